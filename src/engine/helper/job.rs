//! One job: a grammar with its masks, or one rendered text.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{Arc, OnceLock},
    time::Duration,
};

use llguidance::{
    Matcher, ParserFactory,
    api::{ParserLimits, TopLevelGrammar},
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::{Map, Value};

use super::{
    bounds::{BUILD_CPU_MAX, STEP_CPU_MAX},
    frame::{self, Kind},
};
use crate::engine::jinja::{Template, TemplateError};

/// What jobs are done with.
#[derive(Debug, Default)]
pub(in crate::engine) struct Setup {
    /// The text of each token.
    pub(in crate::engine) words: Vec<Vec<u8>>,
    /// The tokens that end an answer.
    pub(in crate::engine) ends: Vec<u32>,
    /// The chat template, if there is one.
    pub(in crate::engine) template: Option<String>,
}

impl Setup {
    pub(super) fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        let mut body = Vec::new();
        push(&mut body, self.template.as_deref().unwrap_or_default().as_bytes())?;
        let ends: Vec<u8> = self.ends.iter().flat_map(|end| end.to_le_bytes()).collect();
        push(&mut body, &ends)?;
        for word in &self.words {
            push(&mut body, word)?;
        }
        stream.write_all(&(body.len() as u64).to_le_bytes())?;
        stream.write_all(&body)
    }

    pub(super) fn read(stream: &mut impl Read) -> io::Result<Self> {
        let mut length = [0; 8];
        stream.read_exact(&mut length)?;
        let mut body = stream.take(u64::from_le_bytes(length));
        let template = String::from_utf8(pull(&mut body)?).map_err(io::Error::other)?;
        let ends = pull(&mut body)?;
        let ends = ends.as_chunks().0.iter().copied().map(u32::from_le_bytes).collect();
        let mut words = Vec::new();
        while body.limit() > 0 {
            words.push(pull(&mut body)?);
        }
        Ok(Self { words, ends, template: Some(template).filter(|template| !template.is_empty()) })
    }
}

fn push(body: &mut Vec<u8>, text: &[u8]) -> io::Result<()> {
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    body.extend(length.to_le_bytes());
    body.extend(text);
    Ok(())
}

fn pull(body: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    body.read_exact(&mut length)?;
    frame::read_body(body, u32::from_le_bytes(length) as usize)
}

/// What jobs share: made once, when the first job needs it.
pub(super) struct Library {
    setup: Setup,
    vocabulary: OnceLock<Option<TokEnv>>,
}

/// Bounds of a job, where it runs under any.
pub(super) trait Bounds {
    /// From now on it may take so much of a processor.
    fn time(&self, most: Duration);
    /// It is about to read what it is given, and may have so many bytes more for that.
    fn given(&self, bytes: usize);
}

impl Library {
    pub(super) fn new(setup: Setup) -> Self {
        Self { setup, vocabulary: OnceLock::new() }
    }

    /// The vocabulary as a tree of bytes; `None` where the library cannot use it.
    pub(super) fn vocabulary(&self) -> Option<&TokEnv> {
        let made = self.vocabulary.get_or_init(|| {
            let Setup { words, ends, .. } = &self.setup;
            let info = TokRxInfo::new(u32::try_from(words.len()).ok()?, ends.first().copied()?);
            let trie = TokTrie::from(&info, words).with_eos_tokens(ends);
            Some(Arc::new(ApproximateTokEnv::new(trie)) as TokEnv)
        });
        made.as_ref()
    }

    /// The compiled template. Made for each job, within its bounds: the compiler evaluates constants and descends into
    /// what a file nests.
    fn template(&self) -> Result<Template, String> {
        let source = self.setup.template.as_deref().ok_or("there is no chat template")?;
        Template::new(source).map_err(|error| error.to_string())
    }

    /// Does the job of this stream, until it is done or its owner has gone.
    pub(super) fn run(&self, stream: &mut UnixStream, bounds: &impl Bounds) -> io::Result<()> {
        let (kind, length) = frame::read_head(stream)?;
        bounds.given(match kind {
            Kind::Compile | Kind::Render => {
                let template = self.setup.template.as_ref().map_or(0, String::len);
                length.saturating_mul(OF_CONTEXT).saturating_add(template.saturating_mul(OF_TEMPLATE))
            }
            _ => length.saturating_mul(OF_GRAMMAR),
        });
        let body = frame::read_body(stream, length)?;
        bounds.time(BUILD_CPU_MAX);
        let result = match kind {
            Kind::Compile => match self.template() {
                Ok(_) => frame::write(stream, Kind::Text, &[]).map(Ok),
                Err(message) => Ok(Err(message)),
            },
            Kind::Render => self.render(stream, &body),
            Kind::Schema | Kind::Lark => self.form(stream, kind, body, bounds),
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
        let context: Map<String, Value> = serde_json::from_slice(context).map_err(io::Error::other)?;
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
        grammar: Vec<u8>,
        bounds: &impl Bounds,
    ) -> io::Result<Result<(), String>> {
        let mut matcher = match self.compile(kind, grammar) {
            Ok(matcher) => matcher,
            Err(message) => return Ok(Err(message)),
        };
        loop {
            frame::write(stream, Kind::GoesOn, &[])?;
            let mask = match matcher.compute_mask_or_eos() {
                Ok(mask) => mask,
                Err(error) => return Ok(Err(format!("{error:#}"))),
            };
            let bits: Vec<u8> = mask.as_slice().iter().flat_map(|word| word.to_le_bytes()).collect();
            frame::write(stream, Kind::Mask, &bits)?;
            let token = match frame::read(stream)? {
                (Kind::Token, token) => token.try_into().map(u32::from_le_bytes),
                (_, other) => Err(other),
            };
            let token = token.map_err(|_| io::Error::other("no token"))?;
            bounds.time(STEP_CPU_MAX);
            if let Err(error) = matcher.consume_token(token) {
                return Ok(Err(format!("{error:#}")));
            }
            if matcher.is_stopped() {
                return frame::write(stream, Kind::Complete, &[]).map(Ok);
            }
        }
    }

    fn compile(&self, kind: Kind, grammar: Vec<u8>) -> Result<Matcher, String> {
        let grammar = if kind == Kind::Lark {
            TopLevelGrammar::from_lark(String::from_utf8(grammar).map_err(|error| error.to_string())?)
        } else {
            let schema = serde_json::from_slice(&grammar).map_err(|error| error.to_string())?;
            drop(grammar);
            TopLevelGrammar::from_json_schema(schema)
        };
        let vocabulary = self.vocabulary().ok_or("the model's vocabulary cannot be used for it")?;
        let mut factory = ParserFactory::new(vocabulary, InferenceCapabilities::default(), &[])
            .map_err(|error| format!("{error:#}"))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let parser = factory.create_parser(grammar).map_err(|error| format!("{error:#}"))?;
        let matcher = Matcher::new(Ok(parser));
        matcher.get_error().map_or(Ok(matcher), Err)
    }
}

/// What a byte of a context takes once it is read: maps of JSON with one short entry each take some 20 times their text, and
/// the text is made of it.
const OF_CONTEXT: usize = 32;

/// What a byte of a template takes once it is compiled: some 20 bytes of instruction and of place for each word.
const OF_TEMPLATE: usize = 32;

/// What a byte of a grammar takes once it is read, beside what is compiled of it.
const OF_GRAMMAR: usize = 4;

/// Far below the library's own limits, which are meant for a server: a parser of the schemas of one product, not of a
/// standard's. They end most of what is too large with a reason, before the bounds of the job end it without one.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1000,
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 10_000,
        max_grammar_size: 100_000,
        // It spends time before the first token to save some later; one answer does not earn it back.
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setup_comes_back_as_it_was_written() {
        let setup = Setup {
            words: vec![b"a".to_vec(), Vec::new(), vec![0xff, 0]],
            ends: vec![2, 700],
            template: Some("{{ x }}".to_owned()),
        };
        let mut bytes = Vec::new();
        setup.write(&mut bytes).unwrap();
        bytes.push(9);
        let mut rest = bytes.as_slice();
        let read = Setup::read(&mut rest).unwrap();
        assert_eq!((read.words, read.ends, read.template), (setup.words, setup.ends, setup.template));
        assert_eq!(rest, [9], "what follows is left to be read");
    }
}
