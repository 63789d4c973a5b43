//! C interface of pocketsphinx 5prealpha, a small speech recogniser.
//!
//! Release 5.0 renamed the calls that configure it.

use std::{
    collections::BTreeSet,
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs,
    path::{Path, PathBuf},
    ptr,
};

use super::library::{Library, LibraryError};

/// The library, without a model.
#[derive(Clone, Copy)]
pub(super) struct Pocketsphinx {
    functions: Functions,
}

#[derive(Clone, Debug)]
pub(super) enum Search {
    /// Sentences of a JSGF grammar, given as text.
    Grammar(String),
    /// Any sentence, by this language model.
    Open(PathBuf),
}

impl Pocketsphinx {
    pub(super) fn load() -> Result<Self, LibraryError> {
        let base = Library::open("libsphinxbase.so.3", REMEDY)?;
        let sphinx = Library::open("libpocketsphinx.so.3", REMEDY)?;
        // SAFETY: these are the signatures in cmd_ln.h, err.h and pocketsphinx.h of 5prealpha.
        let functions = unsafe {
            Functions {
                cmd_ln_parse_r: base.function("cmd_ln_parse_r")?,
                cmd_ln_free_r: base.function("cmd_ln_free_r")?,
                err_set_logfp: base.function("err_set_logfp")?,
                ps_args: sphinx.function("ps_args")?,
                ps_init: sphinx.function("ps_init")?,
                ps_free: sphinx.function("ps_free")?,
                ps_set_jsgf_string: sphinx.function("ps_set_jsgf_string")?,
                ps_set_search: sphinx.function("ps_set_search")?,
                ps_start_utt: sphinx.function("ps_start_utt")?,
                ps_process_raw: sphinx.function("ps_process_raw")?,
                ps_end_utt: sphinx.function("ps_end_utt")?,
                ps_get_hyp: sphinx.function("ps_get_hyp")?,
            }
        };
        // It logs about a hundred lines per start; relevant failures are returned as errors.
        // SAFETY: null disables the log.
        unsafe { (functions.err_set_logfp)(ptr::null_mut()) };
        Ok(Self { functions })
    }

    pub(super) fn decoder(
        self,
        model: &ModelFiles,
        search: &Search,
    ) -> Result<Decoder, SphinxError> {
        let mut words = vec![
            c_string("-hmm")?,
            path_string(&model.acoustic)?,
            c_string("-dict")?,
            path_string(&model.dictionary)?,
        ];
        if let Search::Open(language_model) = search {
            words.push(c_string("-lm")?);
            words.push(path_string(language_model)?);
        }
        let mut pointers: Vec<*mut c_char> =
            words.iter().map(|word| word.as_ptr().cast_mut()).collect();
        let count = c_int::try_from(pointers.len()).map_err(|_| SphinxError::Configuration)?;
        // SAFETY: `ps_args` has no preconditions; the words outlive the call, which copies them.
        let config = unsafe {
            (self.functions.cmd_ln_parse_r)(
                ptr::null_mut(),
                (self.functions.ps_args)(),
                count,
                pointers.as_mut_ptr(),
                1,
            )
        };
        if config.is_null() {
            return Err(SphinxError::Configuration);
        }
        // SAFETY: the configuration is valid; the decoder takes its own reference.
        let raw = unsafe { (self.functions.ps_init)(config) };
        // SAFETY: releases our reference.
        unsafe { (self.functions.cmd_ln_free_r)(config) };
        if raw.is_null() {
            return Err(SphinxError::Model {
                model: model.acoustic.clone(),
            });
        }
        let decoder = Decoder {
            functions: self.functions,
            raw,
        };
        if let Search::Grammar(text) = search
            && let Err(error) = decoder.listen_for(text)
        {
            // It reports only the failure; the usual reason is a word that it cannot pronounce.
            let words = unknown_words(text, &model.dictionary);
            return Err(if words.is_empty() {
                error
            } else {
                SphinxError::Words { words }
            });
        }
        Ok(decoder)
    }
}

/// Decoder with a loaded model, freed on drop.
pub(super) struct Decoder {
    functions: Functions,
    raw: *mut c_void,
}

// SAFETY: a decoder is not bound to the thread that created it; `hear` takes `&mut self`, so one thread uses it at a
// time.
unsafe impl Send for Decoder {}

impl Decoder {
    /// Recognises 16 kHz samples; returns an empty text for silence.
    pub(super) fn hear(&mut self, samples: &[i16]) -> Result<String, SphinxError> {
        let functions = &self.functions;
        // SAFETY: the decoder is valid, and no utterance has been started.
        if unsafe { (functions.ps_start_utt)(self.raw) } < 0 {
            return Err(SphinxError::Utterance);
        }
        let mut failed = false;
        for block in samples.chunks(BLOCK) {
            // SAFETY: the block is valid for reads of its length.
            failed |=
                unsafe { (functions.ps_process_raw)(self.raw, block.as_ptr(), block.len(), 0, 0) }
                    < 0;
        }
        // SAFETY: an utterance has been started.
        failed |= unsafe { (functions.ps_end_utt)(self.raw) } < 0;
        if failed {
            return Err(SphinxError::Utterance);
        }
        let mut score = 0;
        // SAFETY: the score is valid for writes.
        let text = unsafe { (functions.ps_get_hyp)(self.raw, &raw mut score) };
        if text.is_null() {
            return Ok(String::new());
        }
        // SAFETY: the text ends with a NUL and belongs to the decoder, which is not called before it is copied.
        Ok(unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned())
    }

    fn listen_for(&self, grammar: &str) -> Result<(), SphinxError> {
        let text = c_string(grammar)?;
        // SAFETY: the decoder is valid and copies both texts.
        let set = unsafe {
            (self.functions.ps_set_jsgf_string)(self.raw, SEARCH.as_ptr(), text.as_ptr())
        };
        // SAFETY: as above.
        if set < 0 || unsafe { (self.functions.ps_set_search)(self.raw, SEARCH.as_ptr()) } < 0 {
            return Err(SphinxError::Grammar);
        }
        Ok(())
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: created by `ps_init`, and not used afterwards.
        unsafe { (self.functions.ps_free)(self.raw) };
    }
}

#[derive(Clone, Debug)]
pub(super) struct ModelFiles {
    /// Folder of the acoustic model.
    pub(super) acoustic: PathBuf,
    /// Pronouncing dictionary.
    pub(super) dictionary: PathBuf,
    /// Language model for open vocabulary.
    pub(super) language: PathBuf,
}

impl ModelFiles {
    /// Finds the English model in `folder`, or in the packages' location.
    pub(super) fn find(folder: Option<&Path>) -> Result<Self, SphinxError> {
        let folder = folder.unwrap_or(Path::new(MODEL_FOLDER));
        let files = Self {
            acoustic: folder.join("en-us"),
            dictionary: folder.join("cmudict-en-us.dict"),
            language: folder.join("en-us.lm.bin"),
        };
        for path in [
            &files.acoustic.join("mdef"),
            &files.dictionary,
            &files.language,
        ] {
            if !path.is_file() {
                return Err(SphinxError::MissingModel { path: path.clone() });
            }
        }
        Ok(files)
    }
}

/// Reason why pocketsphinx failed.
#[derive(Debug, thiserror::Error)]
pub enum SphinxError {
    /// It is not installed.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A file of the model is missing.
    #[error("cannot find `{}` of the recogniser's model", path.display())]
    MissingModel {
        /// The file.
        path: PathBuf,
    },
    /// It rejects its configuration.
    #[error("pocketsphinx rejected its configuration")]
    Configuration,
    /// It cannot load the model.
    #[error("pocketsphinx cannot load the model in `{}`", model.display())]
    Model {
        /// The folder.
        model: PathBuf,
    },
    /// It rejects the grammar.
    #[error("the grammar is not valid JSGF")]
    Grammar,
    /// The grammar has words that it cannot pronounce.
    #[error("the grammar has words that are not in the dictionary: `{words}`")]
    Words {
        /// The words, without duplicates.
        words: String,
    },
    /// A text or path contains a NUL.
    #[error("a NUL byte in a text for pocketsphinx")]
    Nul,
    /// It failed on a recording.
    #[error("pocketsphinx failed on a recording")]
    Utterance,
}

impl SphinxError {
    /// Returns the remedy, if known.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Library(error) => Some(error.hint()),
            Self::MissingModel { .. } => Some(MODEL_REMEDY),
            _ => None,
        }
    }
}

/// Returns up to [`WORDS_NAMED`] words of a grammar that are not in the dictionary.
fn unknown_words(grammar: &str, dictionary: &Path) -> String {
    let Ok(dictionary) = fs::read(dictionary) else {
        return String::new();
    };
    let mut words = grammar_words(grammar);
    for line in dictionary.split(|&byte| byte == b'\n') {
        let known = line.split(|&byte| byte == b' ').next().unwrap_or_default();
        if let Ok(known) = std::str::from_utf8(known) {
            words.remove(known);
        }
    }
    words
        .into_iter()
        .take(WORDS_NAMED)
        .collect::<Vec<_>>()
        .join("`, `")
}

/// Returns the words on the right-hand sides of a JSGF grammar, without rule names, tags, weights and comments.
fn grammar_words(grammar: &str) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    for rule in grammar.split(';') {
        let Some((_, body)) = rule.split_once('=') else {
            continue;
        };
        let mut word = String::new();
        let mut closing = None;
        for character in body.chars().chain([' ']) {
            match (closing, character) {
                (Some(end), _) if character == end => closing = None,
                (Some(_), _) => {}
                (None, '<') => closing = Some('>'),
                (None, '{') => closing = Some('}'),
                (None, '/') => closing = Some('/'),
                (None, _) if character.is_whitespace() || "|()[]*+\"".contains(character) => {
                    if !word.is_empty() {
                        words.insert(std::mem::take(&mut word));
                    }
                }
                (None, _) => word.push(character),
            }
        }
    }
    words
}

fn c_string(text: &str) -> Result<CString, SphinxError> {
    CString::new(text).map_err(|_| SphinxError::Nul)
}

fn path_string(path: &Path) -> Result<CString, SphinxError> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes()).map_err(|_| SphinxError::Nul)
}

#[derive(Clone, Copy)]
struct Functions {
    cmd_ln_parse_r: unsafe extern "C" fn(
        *mut c_void,
        *const c_void,
        c_int,
        *mut *mut c_char,
        c_int,
    ) -> *mut c_void,
    cmd_ln_free_r: unsafe extern "C" fn(*mut c_void) -> c_int,
    err_set_logfp: unsafe extern "C" fn(*mut c_void),
    ps_args: unsafe extern "C" fn() -> *const c_void,
    ps_init: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    ps_free: unsafe extern "C" fn(*mut c_void) -> c_int,
    ps_set_jsgf_string: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> c_int,
    ps_set_search: unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int,
    ps_start_utt: unsafe extern "C" fn(*mut c_void) -> c_int,
    ps_process_raw: unsafe extern "C" fn(*mut c_void, *const i16, usize, c_int, c_int) -> c_int,
    ps_end_utt: unsafe extern "C" fn(*mut c_void) -> c_int,
    ps_get_hyp: unsafe extern "C" fn(*mut c_void, *mut i32) -> *const c_char,
}

/// Name of the grammar's search in a decoder.
const SEARCH: &CStr = c"grammar";

const WORDS_NAMED: usize = 5;

/// Samples per call: 100 ms.
const BLOCK: usize = 1600;

/// Folder of the model in `pocketsphinx-en-us`.
const MODEL_FOLDER: &str = "/usr/share/pocketsphinx/model/en-us";

const REMEDY: &str = "install it with `apt-get install libpocketsphinx3 libsphinxbase3`";
const MODEL_REMEDY: &str =
    "install it with `apt-get install pocketsphinx-en-us`, or name its folder with `--model-dir`";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_grammar_are_found_among_its_signs() {
        let text = "#JSGF V1.0;\ngrammar x;\npublic <a> = turn (on | off) [the] <dev> {tag; x};\n<dev> = /2/ lamp | o'clock*;";
        let words: Vec<_> = grammar_words(text).into_iter().collect();
        assert_eq!(words, ["lamp", "o'clock", "off", "on", "the", "turn"]);
    }
}
