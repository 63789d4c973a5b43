//! Context types, growth and shrinkage of capacity, and reuse by a second turn.

use std::{fs, time::Instant};

use super::{Workbench, perplexity};
use cotenant::{
    cli::bench::engine::{in_one_line, mib, percent},
    engine::{
        Flow, Model, Sayable,
        arena::Backing,
        backend::cpu::Cpu,
        kv::{KvCache, KvError},
        text::TextSide,
    },
    policy::{
        kv_type::KvType,
        residency::{EnginePlan, LayerKind},
    },
    units::{Bytes, Tokens},
};

impl Workbench<'_> {
    /// Measures context types, and changes of capacity.
    pub(crate) fn context(&mut self) -> Result<(), String> {
        self.perplexities()?;
        self.capacities()?;
        self.goes_on()
    }

    /// Measures the perplexity of a text with each type.
    fn perplexities(&mut self) -> Result<(), String> {
        let Some(path) = &self.args.text else {
            let note = "no text was given (--text), so there is no perplexity".to_owned();
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
            return Ok(());
        };
        let text = fs::read_to_string(path)
            .map_err(|error| format!("cannot read `{}`: {error}", path.display()))?;
        let plan = EnginePlan {
            kv_capacity: Tokens::new(WINDOW),
            ..self.model.plan().clone()
        };
        let mut model = self.another(&plan, Model::open)?;
        let side =
            TextSide::new(model.header(), plan.kv_capacity).map_err(|error| in_one_line(&error))?;
        let tokenizer = side.tokenizer();
        // The final line end is not text, as in `llama-perplexity`.
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let tokens = tokenizer
            .encode_rendered(text, None)
            .map_err(|error| in_one_line(&error))?;
        let mut exact = 0.0;
        for kind in KvType::ALL.into_iter().rev() {
            model
                .apply(&EnginePlan {
                    kv_type: kind,
                    ..plan.clone()
                })
                .map_err(|error| in_one_line(&error))?;
            let found =
                perplexity::evaluate(&mut model, tokenizer, &tokens, WINDOW as usize, &|_| true)?
                    .value();
            self.values
                .add(format!("perplexity, context as {kind}"), "", found);
            if kind == KvType::F16 {
                exact = found;
            } else {
                let change = (found / exact - 1.0) * 100.0;
                self.values
                    .add(format!("its change by {kind}"), "%", change);
            }
        }
        Ok(())
    }

    /// Measures the memory that a reduced vocabulary saves in the head, and the share of a text that it cannot generate
    /// as whole tokens.
    pub(crate) fn vocabulary(&mut self) -> Result<(), String> {
        let Some((wanted, path)) = self.args.vocabulary.as_ref().zip(self.args.text.as_ref())
        else {
            return Err(
                "the section `vocabulary` needs --vocabulary COUNT|FILE and --text FILE".to_owned(),
            );
        };
        let vocabulary = match wanted.parse() {
            Ok(count) => Sayable::First(count),
            Err(_) => Sayable::Text(wanted.into()),
        };
        let text = fs::read_to_string(path)
            .map_err(|error| format!("cannot read `{}`: {error}", path.display()))?;
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let open = |vocabulary: Option<Sayable>| {
            let (shape, _) = Model::inspect_with(
                &self.path,
                vocabulary.as_ref(),
                usize::from(self.settings.threads),
            )
            .map_err(|error| in_one_line(&error))?;
            let plan = EnginePlan {
                resident: (0..u32::try_from(shape.layers.len()).unwrap_or(u32::MAX)).collect(),
                kv_capacity: Tokens::new(WINDOW),
                ..self.model.plan().clone()
            };
            let heads = shape
                .layers
                .iter()
                .filter(|part| part.kind == LayerKind::Head);
            let head: Bytes = heads.map(|part| part.resident_bytes).sum();
            let model = self
                .settings
                .opened(&self.path, &plan, vocabulary, Model::open)?;
            Ok::<_, String>((model, head))
        };
        let ((mut whole, head), (mut reduced, left)) = (open(None)?, open(Some(vocabulary))?);
        let side = TextSide::new(whole.header(), Tokens::new(WINDOW))
            .map_err(|error| in_one_line(&error))?;
        let tokenizer = side.tokenizer();
        let tokens = tokenizer
            .encode_rendered(text, None)
            .map_err(|error| in_one_line(&error))?;
        let said: Vec<bool> = (0..whole.vocabulary())
            .map(|token| reduced.can_say(token))
            .collect();
        let counts = |token: u32| said.get(token as usize).copied().unwrap_or(false);
        let evaluate = |model: &mut Model, counts: &dyn Fn(u32) -> bool| {
            perplexity::evaluate(model, tokenizer, &tokens, WINDOW as usize, counts)
        };
        let all = evaluate(&mut whole, &|_| true)?;
        let same = evaluate(&mut whole, &counts)?;
        let few = evaluate(&mut reduced, &counts)?;
        let stay = u64::try_from(said.iter().filter(|said| **said).count()).unwrap_or(u64::MAX);
        let values = &mut self.values;
        values.add(
            format!("tokens that can be said, of {}", whole.vocabulary()),
            "%",
            percent(stay, u64::from(whole.vocabulary())),
        );
        values.add("the head, all of it", "MiB", mib(head));
        values.add("the head, reduced", "MiB", mib(left));
        values.add(
            "tokens of the text that cannot be said",
            "%",
            percent(few.left_out, all.tokens),
        );
        values.add("perplexity, all tokens of the text", "", all.value());
        values.add("perplexity of those that can be said", "", same.value());
        values.add("the same, when no others can be", "", few.value());
        Ok(())
    }

    /// Measures changes of capacity and type on a separate, fully touched cache.
    fn capacities(&mut self) -> Result<(), String> {
        let shape = self.model.shape().kv;
        let wanted = Bytes::from_mib(self.settings.kv_mib);
        let blocks = wanted
            .get()
            .div_ceil(shape.block_bytes(KvType::F16).get().max(1));
        let tokens = u32::try_from(blocks.saturating_mul(u64::from(shape.block_tokens.get())))
            .map_err(|_| format!("cannot measure {wanted} of context: that is too many tokens"))?;
        let mut backend =
            Cpu::new(usize::from(self.settings.threads)).map_err(|error| in_one_line(&error))?;
        let mut cache = KvCache::new(&backend, shape, tokens, Backing::OnTouch)
            .map_err(|error| in_one_line(&error))?;
        let refused = |error: KvError| in_one_line(&error);
        let timed = |work: &mut dyn FnMut() -> Result<(Bytes, Bytes), KvError>| -> Result<(f64, Bytes, Bytes), String> {
            let started = Instant::now();
            let (asked, freed) = work().map_err(|error| in_one_line(&error))?;
            Ok((started.elapsed().as_secs_f64() * 1e3, asked, freed))
        };
        let (ms, ..) = timed(&mut || {
            cache
                .resize(&mut backend, Tokens::new(tokens), 0)
                .map(|done| (done.grown, Bytes::ZERO))
        })?;
        self.values
            .add(format!("context capacity grown by {wanted}"), "ms", ms);
        // Conversion of the whole cache to a larger type writes all of it.
        cache
            .convert(&mut backend, KvType::Q8, tokens)
            .map_err(refused)?;
        cache
            .convert(&mut backend, KvType::F16, tokens)
            .map_err(refused)?;
        for (from, to) in [
            (KvType::F16, KvType::Q8),
            (KvType::Q8, KvType::F16),
            (KvType::F16, KvType::Q4),
            (KvType::Q4, KvType::F16),
        ] {
            let (ms, asked, freed) = timed(&mut || {
                cache
                    .convert(&mut backend, to, tokens)
                    .map(|done| (done.asked, done.freed))
            })?;
            self.values.add(
                format!("{wanted} of context in use from {from} to {to}"),
                "ms",
                ms,
            );
            if asked > Bytes::ZERO {
                self.values.add(
                    format!("of that from {from} to {to}, seen free by the kernel"),
                    "%",
                    percent(freed.get(), asked.get()),
                );
            }
        }
        let (ms, asked, freed) = timed(&mut || {
            cache
                .resize(&mut backend, Tokens::ZERO, 0)
                .map(|done| (done.asked, done.freed))
        })?;
        self.values.add(
            format!("context capacity, all touched, shrunk by {wanted}"),
            "ms",
            ms,
        );
        self.values.add(
            "of that seen free by the kernel".to_owned(),
            "%",
            percent(freed.get(), asked.get()),
        );
        Ok(())
    }

    /// Checks that the next token after shrinking and growing is bit-identical to that of an undisturbed sequence.
    fn goes_on(&mut self) -> Result<(), String> {
        let all = self.model.plan().clone();
        let (prompt, next) = (self.tokens(0, PROMPT), self.tokens(PROMPT, 1));
        let mut scores = Vec::new();
        for changes in [false, true] {
            self.model.reset();
            self.forward(&prompt)?;
            if changes {
                for capacity in [Tokens::ZERO, all.kv_capacity] {
                    let plan = EnginePlan {
                        kv_capacity: capacity,
                        ..all.clone()
                    };
                    self.model
                        .apply(&plan)
                        .map_err(|error| in_one_line(&error))?;
                }
            }
            let logits = self
                .model
                .forward(&next, &mut || Flow::Continue)
                .map_err(|error| in_one_line(&error))?;
            scores.push(
                logits
                    .iter()
                    .map(|logit| logit.to_bits())
                    .collect::<Vec<u32>>(),
            );
        }
        self.model.reset();
        match scores.as_slice() {
            [one, other] if one == other => Ok(()),
            _ => Err(
                "the next token after the context was shrunk and grown is another one".to_owned(),
            ),
        }
    }

    /// Measures a second turn that diverges from the first shortly before the end of its prompt, as templates cause it.
    pub(crate) fn turns(&mut self) -> Result<(), String> {
        // Copies of the recurrent state are in capacity not used by tokens, as in a usual context.
        let before = self.model.plan().clone();
        let shape = self.model.shape();
        let per_token = shape.kv.bytes_per_token(before.kv_type).get().max(1);
        let copies = u32::try_from(shape.state_bytes.get().div_ceil(per_token)).unwrap_or(u32::MAX);
        let room = shape
            .context_max
            .get()
            .saturating_sub(ANSWER + NEWS + PARTS_BEFORE);
        let length = self.settings.prompt_max.min(room);
        if length < PROMPT {
            return Err(format!(
                "cannot measure turns: a context of {room} tokens is too short"
            ));
        }
        let capacity =
            (length + ANSWER + NEWS).saturating_add(copies) + 2 * shape.kv.block_tokens.get();
        let wider = EnginePlan {
            kv_capacity: before.kv_capacity.max(Tokens::new(capacity)),
            ..before.clone()
        };
        self.model
            .apply(&wider)
            .map_err(|error| in_one_line(&error))?;
        let first = self.tokens(0, length);
        self.model.reset();
        self.model.mark_at(length - PARTS_BEFORE);
        let started = Instant::now();
        self.forward(&first)?;
        let took = started.elapsed().as_secs_f64();
        for place in 0..ANSWER {
            let token = self.tokens(length + place, 1);
            self.forward(&token)?;
        }
        // The answer as rendered by the template in the next prompt, followed by the next message.
        let kept = self.model.keep(length - PARTS_BEFORE);
        let mut second = first.get(..kept as usize).unwrap_or_default().to_vec();
        second.extend(
            first
                .get(kept as usize..(length - PARTS_BEFORE) as usize)
                .unwrap_or_default(),
        );
        second.extend(self.tokens(length, ANSWER + NEWS));
        let fresh = second.get(kept as usize..).unwrap_or_default().to_vec();
        let started = Instant::now();
        self.forward(&fresh)?;
        let again = started.elapsed().as_secs_f64();
        self.model.reset();
        self.model
            .apply(&before)
            .map_err(|error| in_one_line(&error))?;
        self.values.add(
            format!("prompt of {length} tokens, first turn"),
            "ms",
            took * 1e3,
        );
        self.values.add(
            format!(
                "second turn, {} of {} tokens read",
                fresh.len(),
                second.len()
            ),
            "ms",
            again * 1e3,
        );
        self.values.add(
            "second turn's prompt over the first's",
            "ratio",
            again / took,
        );
        Ok(())
    }
}

/// Window of `llama-perplexity -c 512`.
const WINDOW: u32 = 512;
/// Tokens before a change of capacity: more than one block.
const PROMPT: u32 = 100;
/// Tokens of the first answer and of the next message: a spoken sentence each.
const ANSWER: u32 = 16;
const NEWS: u32 = 16;
/// As in the engine's thread: templates diverge this many tokens before the end of a prompt.
const PARTS_BEFORE: u32 = 8;
