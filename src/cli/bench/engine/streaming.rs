//! Streaming: overlap of reading and computing.

use std::{sync::Arc, time::Instant};

use super::subject::Bench;
use cotenant_engine::{
    arena::Backing,
    backend::{Device as _, Limits, cpu::CpuDevice},
    reader::{Extent, Source, Stream, WeightFile},
};
use cotenant_units::causes::in_one_line;

impl Bench<'_> {
    /// Measures decoding with a share of the layers resident, relative to the slower of reading alone and computing
    /// alone. Both are measured next to it, computing before and after.
    pub(super) fn streaming(&mut self) -> Result<(), String> {
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        let mut before = self.decode(self.settings.generate)?;
        for share in SHARES {
            self.apply(share)?;
            self.model.reset();
            self.forward(&first)?;
            // Alternately, because the speed of a shared disk changes within a second.
            let (mut seconds, mut reading, mut turns) = (0.0, 0.0, 0u32);
            while turns == 0
                || (turns < STREAMED_TURNS
                    && seconds * f64::from(STREAMED_TOKENS) < STREAMED_SECONDS)
            {
                seconds += self.decode(STREAMED_TOKENS)?;
                reading += self.read_streamed()?;
                turns += 1;
            }
            seconds /= f64::from(turns);
            reading /= f64::from(turns);
            self.apply(100)?;
            self.model.reset();
            self.forward(&first)?;
            let after = self.decode(self.settings.generate)?;
            let compute = f64::midpoint(before, after);
            before = after;
            self.values
                .speed(format!("decode, {share} % resident"), seconds);
            self.values
                .speed(format!("reading alone at {share} %"), reading);
            self.values
                .speed(format!("computing alone beside {share} %"), compute);
            self.values.add(
                format!("streaming efficiency at {share} %"),
                "of max(io, compute)",
                compute.max(reading) / seconds,
            );
        }
        Ok(())
    }

    /// Returns the seconds in which the readers transfer the streamed parts of one token, without computing.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read_streamed(&self) -> Result<f64, String> {
        let schedule: Arc<[Extent]> = self.streamed().into();
        let file: Arc<dyn Source> = Arc::new(
            WeightFile::open(self.model.header().parts()).map_err(|error| in_one_line(&error))?,
        );
        let pieces = schedule.len();
        let backend = CpuDevice(1)
            .start(&Limits::default())
            .map_err(|error| in_one_line(&error))?;
        let ring = backend.ring(self.layout.ring, Backing::Now);
        let stream = ring
            .and_then(|ring| Stream::start(file, ring, schedule, 0))
            .map_err(|error| in_one_line(&error))?;
        let turn = || {
            for piece in 0..pieces {
                stream
                    .pass(piece, &mut || true)
                    .map_err(|missing| format!("the reader alone failed: {missing:?}"))?;
            }
            Ok::<(), String>(())
        };
        // The first turn only fills the ring, as in a pass.
        turn()?;
        let started = Instant::now();
        for _ in 0..STREAMED_TOKENS {
            turn()?;
        }
        Ok(started.elapsed().as_secs_f64() / f64::from(STREAMED_TOKENS))
    }

    /// Returns the extents that the plan in force reads for each token.
    fn streamed(&self) -> Vec<Extent> {
        let resident = &self.model.plan().resident;
        self.layout
            .parts
            .iter()
            .zip(0u32..)
            .filter(|(_, index)| !resident.contains(index))
            .flat_map(|(part, _)| part.pieces.iter().map(|piece| piece.extent.clone()))
            .collect()
    }
}

/// Measured percentages of resident layers.
const SHARES: [u32; 5] = [90, 75, 50, 25, 0];
/// Tokens per figure of streamed decoding, each of which reads the streamed layers once.
const STREAMED_TOKENS: u32 = 8;
/// Limit on alternations with reading alone; slow decoding ends them earlier.
const STREAMED_TURNS: u32 = 4;
const STREAMED_SECONDS: f64 = 1.5;
