//! C interface of flite, a small speech synthesiser.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    ptr,
};

use super::library::{Library, LibraryError};
use cotenant_speech::audio::MonoAudio;

/// flite with its voice `slt`. Not shared between threads: the library keeps state in globals.
pub(super) struct Flite {
    functions: Functions,
    voice: *mut c_void,
}

// SAFETY: the library has no thread-local state, and one thread at a time uses it: `speak` takes `&mut self`, and
// `Flite::load` is called once per process.
unsafe impl Send for Flite {}

impl Flite {
    pub(super) fn load() -> Result<Self, FliteError> {
        let open = |name| Library::open(name, REMEDY);
        // The voice needs the language and the lexicon, but some builds declare neither as a dependency.
        let flite = open("libflite.so.1")?;
        open("libflite_usenglish.so.1")?;
        open("libflite_cmulex.so.1")?;
        let slt = open("libflite_cmu_us_slt.so.1")?;
        // SAFETY: these are the signatures in flite.h and cst_wave.h of flite 2.2.
        let functions = unsafe {
            Functions {
                init: flite.function("flite_init")?,
                text_to_wave: flite.function("flite_text_to_wave")?,
                delete_wave: flite.function("delete_wave")?,
                register_voice: slt.function("register_cmu_us_slt")?,
            }
        };
        // SAFETY: called once, before any other function of the library.
        unsafe { (functions.init)() };
        // SAFETY: a null folder selects the built-in voice.
        let voice = unsafe { (functions.register_voice)(ptr::null()) };
        if voice.is_null() {
            return Err(FliteError::Voice);
        }
        Ok(Self { functions, voice })
    }

    pub(super) fn speak(&mut self, text: &str) -> Result<MonoAudio, FliteError> {
        // A NUL inside would end the text for C.
        let c_text = CString::new(text.replace('\0', " ")).map_err(|_| FliteError::Silent)?;
        // SAFETY: the text ends with a NUL, the voice comes from the library, and `&mut self` excludes other callers.
        let wave = unsafe { (self.functions.text_to_wave)(c_text.as_ptr(), self.voice) };
        if wave.is_null() {
            return Err(FliteError::Silent);
        }
        // SAFETY: a non-null wave is valid until it is deleted.
        let audio = unsafe { copied(&*wave) };
        // SAFETY: allocated by the library and owned by us.
        unsafe { (self.functions.delete_wave)(wave) };
        audio.ok_or(FliteError::Silent)
    }
}

/// Copies the samples of the first channel.
///
/// # Safety
/// `samples` of the wave must point to the stated number of samples.
unsafe fn copied(wave: &Wave) -> Option<MonoAudio> {
    let rate = u32::try_from(wave.sample_rate)
        .ok()
        .filter(|&rate| rate > 0)?;
    let frames = usize::try_from(wave.num_samples).ok()?;
    let channels = usize::try_from(wave.num_channels)
        .ok()
        .filter(|&channels| channels > 0)?;
    if wave.samples.is_null() {
        return (frames == 0).then(|| MonoAudio::new(rate, Vec::new()));
    }
    // SAFETY: as the caller promises.
    let samples =
        unsafe { std::slice::from_raw_parts(wave.samples, frames.checked_mul(channels)?) };
    Some(MonoAudio::new(
        rate,
        samples.iter().copied().step_by(channels).collect(),
    ))
}

/// Reason why flite failed.
#[derive(Debug, thiserror::Error)]
pub enum FliteError {
    /// It is not installed.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// Its voice cannot be registered.
    #[error("flite has no voice `slt`")]
    Voice,
    /// It returned no audio for a text.
    #[error("flite produced no audio")]
    Silent,
}

/// `cst_wave` of cst_wave.h.
#[repr(C)]
struct Wave {
    kind: *const c_char,
    sample_rate: c_int,
    num_samples: c_int,
    num_channels: c_int,
    samples: *mut i16,
}

struct Functions {
    init: unsafe extern "C" fn() -> c_int,
    text_to_wave: unsafe extern "C" fn(*const c_char, *mut c_void) -> *mut Wave,
    delete_wave: unsafe extern "C" fn(*mut Wave),
    register_voice: unsafe extern "C" fn(*const c_char) -> *mut c_void,
}

const REMEDY: &str = "install it with `apt-get install libflite1`";
