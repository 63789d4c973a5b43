//! Shared libraries opened at run time.

use std::{ffi::OsStr, fmt};

use libloading::os::unix::{Library as UnixLibrary, RTLD_GLOBAL, RTLD_NOW, Symbol};

/// Library that stays open until the program ends.
#[derive(Clone, Copy)]
pub(super) struct Library {
    inner: &'static UnixLibrary,
    name: &'static str,
    remedy: &'static str,
}

impl Library {
    /// Opens a library through the dynamic linker's search path.
    ///
    /// It is never closed: these libraries keep tables and thread state that may outlive any handle.
    ///
    /// # Errors
    /// If it is not installed; `remedy` is the hint.
    pub(super) fn open(name: &'static str, remedy: &'static str) -> Result<Self, LibraryError> {
        // SAFETY: opening runs the initialisers of the library. Those opened here (pocketsphinx, sphinxbase, flite and
        // their dependencies) are C libraries of the distribution whose initialisers have no preconditions.
        let opened = unsafe { UnixLibrary::open(Some(OsStr::new(name)), RTLD_NOW | RTLD_GLOBAL) };
        match opened {
            Ok(library) => Ok(Self {
                inner: Box::leak(Box::new(library)),
                name,
                remedy,
            }),
            Err(source) => Err(LibraryError {
                library: name,
                symbol: None,
                remedy,
                source,
            }),
        }
    }

    /// Returns the address of a function.
    ///
    /// # Safety
    /// `F` must be the type of that function.
    ///
    /// # Errors
    /// If the library has no such function.
    pub(super) unsafe fn function<F: Copy + 'static>(
        self,
        symbol: &'static str,
    ) -> Result<F, LibraryError> {
        // SAFETY: the caller vouches for the type; the library is never closed, so the address stays valid.
        let found: Result<Symbol<F>, _> = unsafe { self.inner.get(symbol.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|source| LibraryError {
            library: self.name,
            symbol: Some(symbol),
            remedy: self.remedy,
            source,
        })
    }
}

/// A library, or a function of it, is missing.
#[derive(Debug)]
pub struct LibraryError {
    library: &'static str,
    symbol: Option<&'static str>,
    remedy: &'static str,
    source: libloading::Error,
}

impl LibraryError {
    /// Returns the remedy.
    pub const fn hint(&self) -> &'static str {
        self.remedy
    }
}

impl fmt::Display for LibraryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.symbol {
            None => write!(f, "cannot load `{}`", self.library),
            Some(symbol) => write!(f, "cannot find `{symbol}` in `{}`", self.library),
        }
    }
}

impl std::error::Error for LibraryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
