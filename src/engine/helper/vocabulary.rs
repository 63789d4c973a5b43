//! Vocabulary for grammars: one byte tree, and the tokens that are plain JSON string text.
//!
//! llguidance's own mask computation keeps two copies of the tree for each class of tokens that it recognises at once,
//! some 80 MiB for 262,144 tokens. Here all classes share one tree: a class is a set of tokens, with a small tree of
//! the others.

use std::sync::{Arc, OnceLock};

use llguidance::{
    Matcher, ParserFactory,
    api::{ParserLimits, TopLevelGrammar},
    earley::{BiasComputer, ParserRecognizer},
    toktrie::{
        InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv,
    },
};

use crate::tokenizer::Pieces;
use cotenant_memory::heap;

/// State shared by the grammars of one model; independent of schemas.
pub(super) struct Vocabulary {
    factory: ParserFactory,
    masks: Arc<Masks>,
}

impl Vocabulary {
    /// `None` if the library cannot use it.
    pub(super) fn new(words: &Pieces, ends: &[u32]) -> Option<Self> {
        let tokens = words.len();
        let first = *ends.first()?;
        if ends.iter().any(|&end| end >= tokens) {
            return None;
        }
        // The factory is built first, before the tree exists and would be copied by it.
        let none = TokTrie::from(&TokRxInfo::new(2, 0), &[Vec::new(), b"a".to_vec()]);
        let tree = Arc::new(Tree {
            none,
            full: OnceLock::new(),
        });
        let environment: TokEnv = Arc::clone(&tree) as _;
        let classes: Vec<_> = CLASSES
            .iter()
            .map(|chars| format!("{PLAIN}{{1,{chars}}}"))
            .collect();
        let mut factory =
            ParserFactory::new(&environment, InferenceCapabilities::default(), &classes).ok()?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let full = {
            let texts: Vec<Vec<u8>> = words
                .iter()
                .map(|word| {
                    if word.len() > WORD_MAX {
                        Vec::new()
                    } else {
                        word.to_vec()
                    }
                })
                .collect();
            let tree = TokTrie::from(&TokRxInfo::new(tokens, first), &texts);
            drop(texts);
            // A copy below the freed memory, so that the heap can shrink.
            tree.with_eos_tokens(ends)
        };
        let classes = CLASSES
            .iter()
            .map(|&chars| Class::of(&full, chars))
            .collect();
        tree.full.set(full).ok()?;
        heap::trim();
        Some(Self {
            factory,
            masks: Arc::new(Masks { tree, classes }),
        })
    }

    /// A grammar ready for its first token.
    pub(super) fn matcher(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        let mut parser = self
            .factory
            .create_parser(grammar)
            .map_err(|error| format!("{error:#}"))?;
        parser.bias_computer = Arc::clone(&self.masks) as _;
        let matcher = Matcher::new(Ok(parser));
        matcher.get_error().map_or(Ok(matcher), Err)
    }
}

/// The tree of all tokens, once built.
struct Tree {
    none: TokTrie,
    full: OnceLock<TokTrie>,
}

impl TokenizerEnv for Tree {
    fn tok_trie(&self) -> &TokTrie {
        self.full.get().unwrap_or(&self.none)
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.tok_trie().greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Computation of the allowed next tokens.
struct Masks {
    tree: Arc<Tree>,
    classes: Vec<Class>,
}

impl BiasComputer for Masks {
    fn compute_bias(&self, recognizer: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        let tree = self.tree.tok_trie();
        let mut allowed = tree.alloc_token_set();
        let state = recognizer.lexer_state();
        if start.is_empty() && recognizer.lexer_mut().subsume_possible(state) {
            for (index, class) in self.classes.iter().enumerate() {
                let whole = recognizer
                    .lexer_mut()
                    .check_subsume(state, index, CLASS_FUEL, None);
                if whole.unwrap_or(false) {
                    class.allow(recognizer, &mut allowed);
                    return allowed;
                }
            }
        }
        tree.add_bias(recognizer, &mut allowed, start);
        allowed
    }

    fn trie(&self) -> &TokTrie {
        self.tree.tok_trie()
    }
}

/// The tokens that are plain text of a JSON string, up to this many characters.
struct Class {
    all: SimpleVob,
    /// The others, as a tree whose tokens are indices into `others`.
    rest: TokTrie,
    others: Vec<TokenId>,
}

impl Class {
    fn of(tree: &TokTrie, chars: usize) -> Self {
        let mut all = tree.alloc_token_set();
        let mut others = Vec::new();
        for token in 0..u32::try_from(tree.vocab_size()).unwrap_or(u32::MAX) {
            let word = tree.token(token);
            if is_plain(word, chars) {
                all.allow_token(token);
            } else if !word.is_empty() {
                others.push(token);
            }
        }
        let texts: Vec<Vec<u8>> = others
            .iter()
            .map(|&token| tree.token(token).to_vec())
            .collect();
        let info = TokRxInfo::new(u32::try_from(texts.len()).unwrap_or(u32::MAX), 0);
        let rest = TokTrie::from(&info, &texts);
        drop(texts);
        Self {
            all,
            rest: rest.clone(),
            others,
        }
    }

    /// Allows all of its tokens, and the others that the grammar allows.
    fn allow(&self, recognizer: &mut ParserRecognizer<'_>, allowed: &mut SimpleVob) {
        let mut rest = self.rest.alloc_token_set();
        self.rest.add_bias(recognizer, &mut rest, &[]);
        allowed.or(&self.all);
        rest.iter_set_entries(|place| {
            if let Some(&token) = self.others.get(place) {
                allowed.allow_token(token);
            }
        });
    }
}

/// Whether `word` matches [`PLAIN`] at most this many times.
fn is_plain(word: &[u8], chars: usize) -> bool {
    str::from_utf8(word).is_ok_and(|text| {
        !text.is_empty()
            && text.chars().count() <= chars
            && text
                .chars()
                .all(|char| !matches!(char, '"' | '\\' | '\0'..='\x1f' | '\x7f'))
    })
}

/// An unescaped character of a JSON string.
const PLAIN: &str = r#"[^"\\\x00-\x1F\x7F]"#;

/// Classes of plain text, largest first: if a string may have 30 more characters, the rest is 1 % of a vocabulary; if
/// it may have 10 more, 7 % (Gemma 3, SmolLM2).
const CLASSES: [usize; 2] = [30, 10];

/// Effort of the library's check whether a class is allowed as a whole; its own value.
const CLASS_FUEL: u64 = 1000;

/// The longest token text accepted by the library; longer tokens cannot be chosen under a grammar.
const WORD_MAX: usize = 1000;

/// Far below the library's own limits, which suit a server: parser limits for the schemas of one product, not of a
/// standard. They reject most oversized schemas with a reason, before the job's bounds end it without one.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1000,
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 5000,
        max_grammar_size: 100_000,
        // It takes time before the first token to save time later; one answer does not amortise it.
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}
