//! Prompts with streamed weights, in chunks of several sizes.

use std::{collections::BTreeSet, time::Instant};

use cotenant::{
    cli::bench::engine::{TOKENS, in_one_line},
    policy::residency::EnginePlan,
    units::Tokens,
};

use super::Workbench;

impl Workbench<'_> {
    /// Measures a prompt with nothing resident, in chunks of several sizes: each chunk reads all weights once. Each
    /// figure includes the share of time for which kernels waited for the disk: if that is small, larger chunks gain
    /// nothing.
    pub(crate) fn chunks(&mut self) -> Result<(), String> {
        let before = self.model.plan().clone();
        let count = CHUNKED_PROMPT.min(before.kv_capacity.get());
        let tokens = self.tokens(0, count);
        for chunk in CHUNKS {
            let plan = EnginePlan {
                resident: BTreeSet::new(),
                prefill_chunk: Tokens::new(chunk),
                ..before.clone()
            };
            self.model
                .apply(&plan)
                .map_err(|error| in_one_line(&error))?;
            self.model.reset();
            let (started, waited) = (Instant::now(), self.model.waited());
            self.forward(&tokens)?;
            let took = started.elapsed().as_secs_f64();
            let waited = (self.model.waited() - waited).as_secs_f64();
            let what = format!("prefill {count} streamed, in chunks of {chunk}");
            self.values
                .add(what.clone(), TOKENS, f64::from(count) / took);
            self.values.add(
                format!("{what}, waiting for the disk"),
                "%",
                waited / took * 100.0,
            );
        }
        self.model
            .apply(&before)
            .map_err(|error| in_one_line(&error))?;
        self.model.reset();
        Ok(())
    }
}

/// Chunk sizes for a streamed prompt: those that plans choose by default.
const CHUNKS: [u32; 3] = [128, 256, 512];
/// Tokens of that prompt.
const CHUNKED_PROMPT: u32 = 1024;
