//! Slice with disjoint parts written by several threads.

use std::{marker::PhantomData, ptr::NonNull};

/// An exclusively borrowed slice, shared by threads.
pub(crate) struct Share<'slice, T> {
    start: NonNull<T>,
    len: usize,
    borrow: PhantomData<&'slice mut [T]>,
}

// SAFETY: `slice` is unsafe, and its callers promise that no two threads touch the same part.
unsafe impl<T: Send> Sync for Share<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Share<'_, T> {}

impl<T> Clone for Share<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Share<'_, T> {}

impl<'slice, T> Share<'slice, T> {
    pub(crate) const fn new(slice: &'slice mut [T]) -> Self {
        let len = slice.len();
        Self {
            // SAFETY: a slice never starts at null.
            start: unsafe { NonNull::new_unchecked(slice.as_mut_ptr()) },
            len,
            borrow: PhantomData,
        }
    }

    /// Number of elements.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// The part of `len` elements from `from`; empty unless all of it is inside.
    ///
    /// # Safety
    ///
    /// While the result is in use, no other thread uses an overlapping part, unless both only read.
    #[expect(
        clippy::mut_from_ref,
        reason = "this is what the type is for; the callers promise exclusion"
    )]
    pub(crate) unsafe fn slice(&self, from: usize, len: usize) -> &mut [T] {
        if from.checked_add(len).is_none_or(|end| end > self.len) {
            assert_in_tests!(false, "a kernel reaches beyond its slice");
            return &mut [];
        }
        // SAFETY: inside the borrowed slice; exclusion is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(from), len) }
    }

    /// The part of `len` elements from `from`, for reading; empty unless all of it is inside.
    ///
    /// # Safety
    ///
    /// While the result is in use, no thread writes to an overlapping part.
    pub(crate) unsafe fn view(&self, from: usize, len: usize) -> &[T] {
        if from.checked_add(len).is_none_or(|end| end > self.len) {
            assert_in_tests!(false, "a kernel reaches beyond its slice");
            return &[];
        }
        // SAFETY: inside the borrowed slice; no thread writes, by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(from), len) }
    }

    /// Address of an element, which need not exist.
    pub(crate) const fn pointer(&self, at: usize) -> *mut T {
        self.start.as_ptr().wrapping_add(at)
    }

    /// Writes one element.
    ///
    /// # Safety
    ///
    /// No other thread uses the element concurrently.
    pub(crate) unsafe fn set(&self, at: usize, value: T) {
        // SAFETY: the caller's promise.
        if let Some(element) = unsafe { self.slice(at, 1) }.first_mut() {
            *element = value;
        }
    }
}
