//! A job of the helper: a grammar with its masks, or one rendered text.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{Mutex, OnceLock},
    time::Duration,
};

use llguidance::{Matcher, api::TopLevelGrammar};
use serde_json::{Map, Value};

use super::{
    bounds::{BUILD_CPU_MAX, STEP_CPU_MAX},
    frame::{self, Kind},
    vocabulary::Vocabulary,
};
use crate::{
    jinja::{Template, TemplateError},
    tokenizer::Pieces,
};
use cotenant_units::lock::locked;

/// Inputs of jobs.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    /// The text of each token.
    pub(crate) words: Pieces,
    /// The tokens that end an answer.
    pub(crate) ends: Vec<u32>,
    /// The chat template, if there is one.
    pub(crate) template: Option<String>,
}

impl Setup {
    pub(super) fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        push(
            stream,
            self.template.as_deref().unwrap_or_default().as_bytes(),
        )?;
        push(stream, &le_bytes(&self.ends))?;
        push(stream, &le_bytes(self.words.ends()))?;
        push(stream, self.words.bytes())
    }

    pub(super) fn read(stream: &mut impl Read) -> io::Result<Self> {
        let template = String::from_utf8(pull(stream)?).map_err(io::Error::other)?;
        let ends = from_le_bytes(&pull(stream)?);
        let places = from_le_bytes(&pull(stream)?);
        let words = Pieces::from_parts(pull(stream)?, places);
        Ok(Self {
            words,
            ends,
            template: Some(template).filter(|template| !template.is_empty()),
        })
    }
}

/// Numbers as the bytes of a frame.
pub(crate) fn le_bytes(numbers: &[u32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

fn from_le_bytes(bytes: &[u8]) -> Vec<u32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .copied()
        .map(u32::from_le_bytes)
        .collect()
}

fn push(stream: &mut impl Write, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(body)
}

fn pull(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    frame::read_body(stream, u32::from_le_bytes(length) as usize)
}

/// State shared by jobs.
pub(super) struct Library {
    template: Option<String>,
    ends: Vec<u32>,
    /// Kept until the vocabulary is built from them.
    words: Mutex<Option<Pieces>>,
    vocabulary: OnceLock<Option<Vocabulary>>,
}

/// Bounds of a job, if it has any.
pub(super) trait Bounds {
    /// Sets its remaining CPU time.
    fn time(&self, most: Duration);
    /// Extends its allocation limit by the bytes of the input that it is about to read.
    fn given(&self, bytes: usize);
}

impl Library {
    pub(super) fn new(setup: Setup) -> Self {
        let Setup {
            words,
            ends,
            template,
        } = setup;
        Self {
            template,
            ends,
            words: Mutex::new(Some(words)),
            vocabulary: OnceLock::new(),
        }
    }

    /// The vocabulary, built for the first grammar; `None` if the library cannot use it.
    pub(super) fn vocabulary(&self) -> Option<&Vocabulary> {
        let make = || {
            let words = locked(&self.words).take()?;
            Vocabulary::new(&words, &self.ends)
        };
        self.vocabulary.get_or_init(make).as_ref()
    }

    /// The compiled template. Compiled in each job, within its bounds: the compiler evaluates constants and recurses
    /// into the nesting of the file.
    fn template(&self) -> Result<Template, String> {
        let source = self
            .template
            .as_deref()
            .ok_or("there is no chat template")?;
        Template::new(source).map_err(|error| error.to_string())
    }

    /// Runs the job of this stream, until it is done or its owner has disconnected.
    pub(super) fn run(&self, stream: &mut UnixStream, bounds: &impl Bounds) -> io::Result<()> {
        let (kind, length) = frame::read_head(stream)?;
        bounds.given(match kind {
            Kind::Compile | Kind::Render => {
                let template = self.template.as_ref().map_or(0, String::len);
                length
                    .saturating_mul(OF_CONTEXT)
                    .saturating_add(template.saturating_mul(OF_TEMPLATE))
            }
            // The memory of a grammar's source is part of its limit.
            _ => 0,
        });
        let body = frame::read_body(stream, length)?;
        bounds.time(BUILD_CPU_MAX);
        let result = match kind {
            Kind::Compile => match self.template() {
                Ok(_) => frame::write(stream, Kind::Text, &[]).map(Ok),
                Err(message) => Ok(Err(message)),
            },
            Kind::Render => self.render(stream, &body),
            Kind::Schema | Kind::Lark => self.form(stream, kind, &body, bounds),
            _ => Ok(Err("it begins with no job".to_owned())),
        };
        match result? {
            Ok(()) => Ok(()),
            Err(message) => frame::write(stream, Kind::Failed, message.as_bytes()),
        }
    }

    fn render(&self, stream: &mut UnixStream, context: &[u8]) -> io::Result<Result<(), String>> {
        let template = match self.template() {
            Ok(template) => template,
            Err(message) => return Ok(Err(message)),
        };
        let context: Map<String, Value> =
            serde_json::from_slice(context).map_err(io::Error::other)?;
        let (kind, text) = match template.render(&context) {
            Ok(text) => (Kind::Text, text),
            Err(TemplateError::Refused(message)) => (Kind::Refused, message),
            Err(TemplateError::Failed(message)) => return Ok(Err(message)),
        };
        frame::write(stream, kind, text.as_bytes()).map(Ok)
    }

    fn form(
        &self,
        stream: &mut UnixStream,
        kind: Kind,
        grammar: &[u8],
        bounds: &impl Bounds,
    ) -> io::Result<Result<(), String>> {
        let mut followed = match Followed::new(self, kind, grammar) {
            Ok(followed) => followed,
            Err(message) => return Ok(Err(message)),
        };
        let mut forced = Vec::new();
        loop {
            frame::write(stream, Kind::GoesOn, &forced)?;
            // Forced bytes are sent without a mask, unless the owner requests one.
            let mut next = None;
            if !forced.is_empty() {
                next = match frame::read(stream)? {
                    (Kind::Mask, _) => None,
                    given => Some(given),
                };
            }
            if next.is_none() {
                let bits = match followed.mask(bounds) {
                    Ok(bits) => bits,
                    Err(message) => return Ok(Err(message)),
                };
                frame::write(stream, Kind::Mask, &bits)?;
            }
            let tokens = match next.map_or_else(|| frame::read(stream), Ok)? {
                (Kind::Token, tokens) if !tokens.is_empty() => from_le_bytes(&tokens),
                _ => return Err(io::Error::other("no token")),
            };
            bounds.time(STEP_CPU_MAX);
            if let Err(message) = followed.accept(&tokens) {
                return Ok(Err(message));
            }
            if followed.matcher.is_stopped() {
                return frame::write(stream, Kind::Complete, &[]).map(Ok);
            }
            forced = followed.forced();
        }
    }

    fn compile(&self, kind: Kind, grammar: &[u8]) -> Result<Matcher, String> {
        let grammar = if kind == Kind::Lark {
            TopLevelGrammar::from_lark(
                String::from_utf8(grammar.to_vec()).map_err(|error| error.to_string())?,
            )
        } else {
            TopLevelGrammar::from_json_schema(
                serde_json::from_slice(grammar).map_err(|error| error.to_string())?,
            )
        };
        self.vocabulary()
            .ok_or("the model's vocabulary cannot be used for it")?
            .matcher(grammar)
    }
}

/// A grammar, and the answer so far.
struct Followed<'library> {
    library: &'library Library,
    kind: Kind,
    grammar: &'library [u8],
    matcher: Matcher,
    said: Vec<u32>,
    /// Length of the answer when the matcher was built.
    made_at: usize,
}

impl<'library> Followed<'library> {
    fn new(
        library: &'library Library,
        kind: Kind,
        grammar: &'library [u8],
    ) -> Result<Self, String> {
        let matcher = library.compile(kind, grammar)?;
        Ok(Self {
            library,
            kind,
            grammar,
            matcher,
            said: Vec::new(),
            made_at: 0,
        })
    }

    /// The allowed next tokens, one bit each. Lexer states accumulate while masks look ahead, and the library never
    /// frees them: at their limit the grammar is recompiled and replays the answer.
    fn mask(&mut self, bounds: &impl Bounds) -> Result<Vec<u8>, String> {
        let mask = match self.matcher.compute_mask_or_eos() {
            Err(_) if self.made_at < self.said.len() => {
                bounds.time(BUILD_CPU_MAX);
                // The old matcher is freed before the new one is built.
                self.matcher = Matcher::new(Err(io::Error::other("it is compiled again").into()));
                self.matcher = self.library.compile(self.kind, self.grammar)?;
                self.matcher
                    .consume_tokens(&self.said)
                    .map_err(|error| format!("{error:#}"))?;
                self.made_at = self.said.len();
                self.matcher.compute_mask_or_eos()
            }
            computed => computed,
        };
        let mask = mask.map_err(|error| format!("{error:#}"))?;
        Ok(mask
            .as_slice()
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect())
    }

    fn accept(&mut self, tokens: &[u32]) -> Result<(), String> {
        self.matcher
            .consume_tokens(tokens)
            .map_err(|error| format!("{error:#}"))?;
        self.said.extend_from_slice(tokens);
        Ok(())
    }

    /// The forced bytes, if they are worth a token.
    fn forced(&mut self) -> Vec<u8> {
        let mut forced = self.matcher.compute_ff_bytes();
        forced.truncate(FORCED_MAX);
        if forced.len() < FORCED_MIN {
            forced.clear();
        }
        forced
    }
}

/// Most forced bytes at once: a few hundred tokens, more than one pass computes. A value may be as long as a schema.
const FORCED_MAX: usize = 1024;

/// Fewest forced bytes worth a frame: their last token is left to the model, and most tokens have two bytes or more.
const FORCED_MIN: usize = 4;

/// Memory per byte of a parsed context: JSON maps of one short entry each take some 20 times their text, in addition to
/// the rendered text.
const OF_CONTEXT: usize = 32;

/// Memory per byte of a compiled template: some 20 bytes of instruction and position per word.
const OF_TEMPLATE: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setup_comes_back_as_it_was_written() {
        let setup = Setup {
            words: [b"a".as_slice(), &[], &[0xff, 0]].into_iter().collect(),
            ends: vec![2, 700],
            template: Some("{{ x }}".to_owned()),
        };
        let mut bytes = Vec::new();
        setup.write(&mut bytes).unwrap();
        bytes.push(9);
        let mut rest = bytes.as_slice();
        let read = Setup::read(&mut rest).unwrap();
        assert_eq!(
            (read.words, read.ends, read.template),
            (setup.words, setup.ends, setup.template)
        );
        assert_eq!(rest, [9], "what follows is left to be read");
    }
}
