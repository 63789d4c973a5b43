//! Concatenated bytes of tokens.

/// The bytes of every token, in one allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Pieces {
    /// From the bytes of all tokens and their end offsets.
    pub(crate) const fn from_parts(bytes: Vec<u8>, ends: Vec<u32>) -> Self {
        Self { bytes, ends }
    }

    pub(super) fn push(&mut self, bytes: impl Iterator<Item = u8>) {
        self.bytes.extend(bytes);
        self.ends
            .push(u32::try_from(self.bytes.len()).unwrap_or(u32::MAX));
    }

    pub(super) fn get(&self, token: u32) -> &[u8] {
        let range = || {
            let end = *self.ends.get(token as usize)?;
            let start = match token.checked_sub(1) {
                Some(before) => *self.ends.get(before as usize)?,
                None => 0,
            };
            self.bytes.get(start as usize..end as usize)
        };
        range().unwrap_or_default()
    }

    /// The number of tokens.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.ends.len()).unwrap_or(u32::MAX)
    }

    /// The bytes of all tokens.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// End offset of each token.
    pub(crate) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The bytes of each.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).map(|token| self.get(token))
    }
}

impl<'bytes> FromIterator<&'bytes [u8]> for Pieces {
    fn from_iter<I: IntoIterator<Item = &'bytes [u8]>>(all: I) -> Self {
        let mut pieces = Self::default();
        for bytes in all {
            pieces.push(bytes.iter().copied());
        }
        pieces
    }
}
