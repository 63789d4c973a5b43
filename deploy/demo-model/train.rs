//! Trains the demo model on dialogues it generates, and writes it as GGUF.
//!
//! ```text
//! RAYON_NUM_THREADS=1 train-demo OUT_DIRECTORY STEPS [SEED]
//! ```
//!
//! Writes `demo.gguf` (Q8_0), `demo-f32.gguf` and `loss.tsv` anew every few minutes; `heldout.txt`, `tokenizer.json` and
//! `grammar.tsv` (the sentences of the recogniser's grammar with their answers) at once. The same seed, number of steps and
//! type of processor give the same file. Each of two threads computes the gradient of half of the batch, which keeps both
//! busy where a shared pool would not: most operations of so small a model are too short to be split.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a program for developers: wrong sizes may stop it, and numbers of this model are small"
)]

mod dialogues;
mod export;
mod fused;
mod model;
#[rustfmt::skip]
mod phrases;
mod tokenizer;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Instant;

use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor, Var};

use dialogues::{Dialogue, Generator, Split};
use model::{CrossEntropy, Model};
use tokenizer::{END_OF_TEXT, MESSAGE_END, MESSAGE_START, Trained};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Tokens of the vocabulary, the control tokens included.
const VOCABULARY: usize = 1536;
/// Dialogues the tokenizer is trained on.
const TOKENIZER_DIALOGUES: usize = 20_000;
/// Tokens that a worker sees in one step.
const WORKER_TOKENS: usize = 1024;
/// Tokens of a row; in each fourth step all of [`WORKER_TOKENS`] are one row, for distances beyond this.
const CONTEXT: usize = 512;
/// Threads that compute gradients.
const WORKERS: usize = 2;
/// Steps until the learning rate is at its peak.
const WARM_UP: usize = 60;
/// Peak learning rate.
const RATE: f32 = 2e-3;
/// Share of the peak that is left at the end.
const RATE_END: f32 = 0.02;
const WEIGHT_DECAY: f32 = 0.05;
/// Largest norm of the gradient of all weights together.
const CLIP: f32 = 1.;
/// Weight in the loss of tokens that are not the assistant's.
const OTHERS: f32 = 0.2;
/// Seconds between two exports.
const EXPORT_S: u64 = 150;
/// Bytes of the held-out text, about.
const HELD_OUT_BYTES: usize = 64 * 1024;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(out), Some(steps)) = (args.next(), args.next()) else {
        return Err("usage: train OUT_DIRECTORY STEPS [SEED]".into());
    };
    let (out, steps) = (Path::new(&out), steps.parse::<usize>()?);
    let seed = args.next().map_or(Ok(1), |seed| seed.parse::<u64>())?;
    std::fs::create_dir_all(out)?;

    let mut generator = Generator::new(seed, Split::Train);
    // the control tokens are no words; roles and line ends are
    let lines: Vec<String> = (0..TOKENIZER_DIALOGUES)
        .map(|_| generator.dialogue().chatml())
        .flat_map(|text| {
            text.split(MESSAGE_START)
                .flat_map(|part| part.split(MESSAGE_END))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    let tokenizer = Trained::new(&lines, VOCABULARY)?;
    tokenizer
        .tokenizer
        .save(out.join("tokenizer.json"), false)?;
    let held_out = held_out(seed);
    std::fs::write(out.join("heldout.txt"), &held_out)?;
    let mut evaluation = Rows::of_text(&tokenizer, &held_out)?;
    evaluation.truncate(16);
    let grammar = dialogues::grammar_turns();
    let table: String = grammar
        .iter()
        .map(|turn| format!("{}\t{}\n", turn.user, turn.assistant))
        .collect();
    std::fs::write(out.join("grammar.tsv"), table)?;
    // one at a time, each from an empty state
    let grammar = grammar
        .into_iter()
        .map(|turn| {
            Ok(Batch::padded(
                &tokenizer,
                tokenizer.encode(&closed(&Dialogue {
                    system: None,
                    turns: vec![turn],
                }))?,
                model::CHUNK,
            ))
        })
        .collect::<Result<Vec<_>>>()?;

    let model = Model::new(tokenizer.tokens().len(), seed)?;
    eprintln!(
        "{} parameters, {} tokens, {} bytes held out",
        model.parameters(),
        tokenizer.tokens().len(),
        held_out.len()
    );
    let mut rows: Vec<Rows> = (0..WORKERS as u64)
        .map(|i| Rows::new(Generator::new(seed + 1000 + i, Split::Train)))
        .collect();
    let mut optimizer = AdamW::default();
    let mut curve = String::from("step\tseconds\ttokens\tloss\theld_out_loss\n");
    let (start, mut exported) = (Instant::now(), Instant::now());
    let (mut sum, mut count) = (0f32, 0);
    for step in 0..steps {
        let results = std::thread::scope(|scope| {
            let (model, tokenizer) = (&model, &tokenizer);
            let context = if step % 4 == 3 {
                WORKER_TOKENS
            } else {
                CONTEXT
            };
            let workers: Vec<_> = rows
                .iter_mut()
                .map(|rows| {
                    scope.spawn(move || gradient(model, &rows.take(tokenizer, context)?, step == 0))
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().map_err(|_| "a worker panicked")?)
                .collect::<Result<Vec<_>>>()
        })?;
        optimizer.step(
            &model.weights,
            &results
                .iter()
                .map(|(_, gradient)| gradient)
                .collect::<Vec<_>>(),
            rate(step, steps),
        )?;
        sum += results.iter().map(|(loss, _)| loss).sum::<f32>() / WORKERS as f32;
        count += 1;
        let last = step + 1 == steps;
        let due = last || exported.elapsed().as_secs() >= EXPORT_S;
        if due || (step + 1).is_multiple_of(20) {
            let mut line = format!(
                "{}\t{}\t{}\t{:.4}\t",
                step + 1,
                start.elapsed().as_secs(),
                (step + 1) * WORKERS * WORKER_TOKENS,
                sum / count as f32
            );
            if due || (step + 1).is_multiple_of(200) {
                let (loss, right) = evaluate(&model, &evaluation)?;
                write!(line, "{loss:.4}")?;
                eprintln!("held out: loss {loss:.4}, {right}");
            }
            eprintln!("{line}");
            curve += &line;
            curve.push('\n');
            (sum, count) = (0., 0);
        }
        if due {
            std::fs::write(out.join("loss.tsv"), &curve)?;
            export::write(&out.join("demo.gguf"), &model, &tokenizer, GgmlDType::Q8_0)?;
            export::write(
                &out.join("demo-f32.gguf"),
                &model,
                &tokenizer,
                GgmlDType::F32,
            )?;
            exported = Instant::now();
        }
    }
    eprintln!("grammar: {}", evaluate(&model, &grammar)?.1);
    Ok(())
}

/// Dialogues that each hold a slot combination which is never trained on, as one text.
fn held_out(seed: u64) -> String {
    let mut generator = Generator::new(seed, Split::HeldOut);
    let mut text = String::new();
    while text.len() < HELD_OUT_BYTES {
        text += &closed(&generator.dialogue());
    }
    text
}

/// A dialogue and the token after which nothing of it matters any more.
fn closed(dialogue: &Dialogue) -> String {
    format!("{}{END_OF_TEXT}\n", dialogue.chatml())
}

/// Tokens of one batch with the weight of each as a target.
struct Batch {
    /// Tokens of a row; each row has one more, the target of its last.
    context: usize,
    ids: Vec<u32>,
    weights: Vec<f32>,
}

impl Batch {
    /// Inputs `[rows, context]`, and the right next tokens.
    fn split(&self) -> Result<(Tensor, CrossEntropy)> {
        let count = self.ids.len() / (self.context + 1);
        let inputs: Vec<u32> = self
            .ids
            .chunks(self.context + 1)
            .flat_map(|row| row[..self.context].to_vec())
            .collect();
        let targets = self
            .ids
            .chunks(self.context + 1)
            .flat_map(|row| row[1..].to_vec())
            .collect();
        let weights = self
            .weights
            .chunks(self.context + 1)
            .flat_map(|row| row[1..].to_vec())
            .collect();
        Ok((
            Tensor::from_vec(inputs, (count, self.context), &Device::Cpu)?,
            CrossEntropy { targets, weights },
        ))
    }
}

/// Fills rows with whole dialogues; each row begins with one.
struct Rows {
    generator: Generator,
}

impl Rows {
    fn new(generator: Generator) -> Self {
        Self { generator }
    }

    fn take(&mut self, tokenizer: &Trained, context: usize) -> Result<Batch> {
        let mut batch = Batch {
            context,
            ids: Vec::new(),
            weights: Vec::new(),
        };
        for _ in 0..WORKER_TOKENS / context {
            let mut ids = Vec::new();
            while ids.len() <= context {
                ids.extend(tokenizer.encode(&closed(&self.generator.dialogue()))?);
            }
            ids.truncate(context + 1);
            batch.weights.extend(weights(tokenizer, &ids));
            batch.ids.extend(ids);
        }
        Ok(batch)
    }

    /// Cuts `text` into rows that begin with a dialogue each.
    fn of_text(tokenizer: &Trained, text: &str) -> Result<Vec<Batch>> {
        let mut batches = Vec::new();
        let mut ids: Vec<u32> = Vec::new();
        for dialogue in text.split_inclusive("<|endoftext|>\n") {
            let more = tokenizer.encode(dialogue)?;
            if ids.len() + more.len() > CONTEXT + 1 && !ids.is_empty() {
                batches.push(Batch::padded(tokenizer, std::mem::take(&mut ids), CONTEXT));
            }
            ids.extend(more);
        }
        Ok(batches)
    }
}

impl Batch {
    fn padded(tokenizer: &Trained, mut ids: Vec<u32>, context: usize) -> Self {
        ids.truncate(context + 1);
        let mut weights = weights(tokenizer, &ids);
        // only answers count
        weights.iter_mut().for_each(|w| *w = w.floor());
        // the row once more and again: one token for a whole chunk is what `delta_rule` cannot do
        let length = ids.len();
        for i in length..=context {
            ids.push(ids[i - length]);
        }
        weights.resize(context + 1, 0.);
        Self {
            context,
            ids,
            weights,
        }
    }
}

/// 1 for the assistant's words and the token that ends them, [`OTHERS`] for the rest.
fn weights(tokenizer: &Trained, ids: &[u32]) -> Vec<f32> {
    let (start, end) = (
        tokenizer.control(MESSAGE_START),
        tokenizer.control(MESSAGE_END),
    );
    let assistant = tokenizer.encode("assistant\n").unwrap_or_default();
    let mut inside = false;
    (0..ids.len())
        .map(|i| {
            let begins = i > assistant.len()
                && ids[..i].ends_with(&assistant)
                && ids[i - assistant.len() - 1] == start;
            inside |= begins;
            let weight = if inside { 1. } else { OTHERS };
            inside &= ids[i] != end;
            weight
        })
        .collect()
}

/// Loss and the gradient of each weight, by its name.
type Gradient = (f32, BTreeMap<String, Vec<f32>>);

fn gradient(model: &Model, batch: &Batch, check: bool) -> Result<Gradient> {
    let (inputs, loss) = batch.split()?;
    let loss = model.head(&model.hidden(&inputs)?)?.apply_op1(loss)?;
    let gradients = loss.backward()?;
    let mut all = BTreeMap::new();
    for (name, var) in &model.weights {
        match gradients.get(var) {
            Some(gradient) => {
                all.insert(name.clone(), gradient.flatten_all()?.to_vec1::<f32>()?);
            }
            // a fused operation cuts the gradient without an error
            None if check => return Err(format!("weight `{name}` has no gradient").into()),
            None => {}
        }
    }
    Ok((loss.to_scalar::<f32>()?, all))
}

/// Mean loss of the answers' tokens, and how many of them (and how many whole answers) are what the model would have said.
fn evaluate(model: &Model, batches: &[Batch]) -> Result<(f32, String)> {
    let (mut sum, mut tokens, mut right, mut answers, mut right_answers) =
        (0f64, 0u32, 0u32, 0u32, 0u32);
    for batch in batches {
        let (inputs, op) = batch.split()?;
        let logits = model.head(&model.hidden(&inputs)?.detach())?.detach();
        let best = logits.argmax(1)?.to_vec1::<u32>()?;
        let (mut inside, mut good) = (false, true);
        for ((&best, &target), &weight) in best.iter().zip(&op.targets).zip(&op.weights) {
            if weight > 0. {
                (inside, good) = (true, (good || !inside) && best == target);
                tokens += 1;
                right += u32::from(best == target);
            } else if inside {
                answers += 1;
                right_answers += u32::from(good);
                (inside, good) = (false, true);
            }
        }
        let total: f32 = op.weights.iter().sum();
        sum += f64::from(total) * f64::from(logits.apply_op1(op)?.to_scalar::<f32>()?);
    }
    let loss = sum / f64::from(tokens.max(1));
    Ok((
        loss as f32,
        format!("{right} of {tokens} tokens and {right_answers} of {answers} answers right"),
    ))
}

/// Warm-up, then half a cosine.
fn rate(step: usize, steps: usize) -> f32 {
    if step < WARM_UP {
        return RATE * (step + 1) as f32 / WARM_UP as f32;
    }
    let progress = (step - WARM_UP) as f32 / (steps - WARM_UP).max(1) as f32;
    RATE * (RATE_END + (1. - RATE_END) * 0.5 * (1. + (std::f32::consts::PI * progress).cos()))
}

/// Adam with decoupled weight decay and a limit on the gradient's norm.
#[derive(Default)]
struct AdamW {
    steps: i32,
    moments: BTreeMap<String, (Vec<f32>, Vec<f32>)>,
}

impl AdamW {
    fn step(
        &mut self,
        weights: &BTreeMap<String, Var>,
        gradients: &[&BTreeMap<String, Vec<f32>>],
        rate: f32,
    ) -> Result<()> {
        const FIRST: f32 = 0.9;
        const SECOND: f32 = 0.98;
        self.steps += 1;
        let mut means: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
        for gradient in gradients {
            for (name, values) in *gradient {
                let mean = means.entry(name).or_insert_with(|| vec![0.; values.len()]);
                mean.iter_mut()
                    .zip(values)
                    .for_each(|(mean, value)| *mean += value / gradients.len() as f32);
            }
        }
        let norm = means
            .values()
            .flatten()
            .map(|&g| f64::from(g) * f64::from(g))
            .sum::<f64>()
            .sqrt() as f32;
        if !norm.is_finite() {
            eprintln!("step {}: the gradient is not finite; left out", self.steps);
            return Ok(());
        }
        let clip = (CLIP / norm.max(1e-6)).min(1.);
        let (c1, c2) = (1. - FIRST.powi(self.steps), 1. - SECOND.powi(self.steps));
        for (name, mean) in means {
            let Some(var) = weights.get(name) else {
                continue;
            };
            // norms, biases and decays are not pulled to zero
            let decay = if var.rank() == 2 && !name.ends_with("_conv") {
                1. - rate * WEIGHT_DECAY
            } else {
                1.
            };
            let mut values = var.flatten_all()?.to_vec1::<f32>()?;
            let (first, second) = self
                .moments
                .entry(name.to_owned())
                .or_insert_with(|| (vec![0.; values.len()], vec![0.; values.len()]));
            for (((w, g), m), v) in values.iter_mut().zip(mean).zip(first).zip(second) {
                let g = g * clip;
                *m = FIRST * *m + (1. - FIRST) * g;
                *v = SECOND * *v + (1. - SECOND) * g * g;
                *w = *w * decay - rate * (*m / c1) / ((*v / c2).sqrt() + 1e-8);
            }
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer, a model of its size, and one short row.
    fn small() -> (Trained, Model, Batch) {
        let mut generator = Generator::new(5, Split::Train);
        let lines: Vec<String> = (0..200).map(|_| generator.dialogue().chatml()).collect();
        let tokenizer = Trained::new(&lines, 400).unwrap();
        let model = Model::new(tokenizer.tokens().len(), 5).unwrap();
        let mut batch = Rows::new(generator).take(&tokenizer, model::CHUNK).unwrap();
        batch.ids.truncate(model::CHUNK + 1);
        batch.weights.truncate(model::CHUNK + 1);
        (tokenizer, model, batch)
    }

    #[test]
    fn each_weight_has_a_gradient_and_steps_lower_the_loss() {
        let (_, model, batch) = small();
        let mut optimizer = AdamW::default();
        let losses: Vec<f32> = (0..5)
            .map(|_| {
                let (loss, gradient) = gradient(&model, &batch, true).unwrap();
                optimizer.step(&model.weights, &[&gradient], 1e-3).unwrap();
                loss
            })
            .collect();
        assert!(losses[4] < losses[0] - 0.3, "{losses:?}");
    }

    #[test]
    fn only_the_answer_and_its_end_count_in_full() {
        let (tokenizer, ..) = small();
        let ids = tokenizer
            .encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n")
            .unwrap();
        let counted: Vec<u32> = ids
            .iter()
            .zip(weights(&tokenizer, &ids))
            .filter(|(_, w)| *w == 1.)
            .map(|(&id, _)| id)
            .collect();
        assert_eq!(counted, tokenizer.encode("Hello.<|im_end|>").unwrap());
    }

    #[test]
    fn the_file_can_be_read_back() {
        let (tokenizer, model, _) = small();
        let path = std::env::temp_dir().join(format!("demo-model-{}.gguf", std::process::id()));
        export::write(&path, &model, &tokenizer, GgmlDType::Q8_0).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(bytes[4..8], 3u32.to_le_bytes());
        let file =
            candle_core::quantized::gguf_file::Content::read(&mut std::io::Cursor::new(&bytes))
                .unwrap();
        let shape = |name: &str| file.tensor_infos[name].shape.dims().to_vec();
        assert_eq!(file.tensor_infos.len(), 2 + 6 * 14 + 2 * 11);
        assert_eq!(shape("blk.0.ssm_conv1d.weight"), [512, 4]);
        assert_eq!(shape("blk.3.attn_q.weight"), [1024, 256]);
        assert_eq!(shape("blk.4.attn_qkv.weight"), [512, 256]);
    }
}
