//! Cost of elasticity: compared with an engine without it, and with a busy neighbour.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cotenant::{
    cli::bench::engine::{TOKENS, in_one_line},
    engine::{Flow, Model},
    policy::residency::EnginePlan,
    units::Tokens,
};

use super::Workbench;

impl Workbench<'_> {
    /// Measures decoding with all layers resident after they were released and reread, alternately with the same engine
    /// whose layers never changed.
    pub(crate) fn ability(&mut self) -> Result<(), String> {
        let plan = EnginePlan {
            kv_capacity: Tokens::new(256),
            ..self.model.plan().clone()
        };
        let mut fixed = self.another(&plan, Model::open_whole)?;
        self.apply(0)?;
        self.apply(100)?;
        let tokens = self.tokens(0, ABILITY_TOKENS);
        let turn = |model: &mut Model| -> Result<f64, String> {
            model.reset();
            let started = Instant::now();
            for token in &tokens {
                model
                    .forward(&[*token], &mut || Flow::Continue)
                    .map_err(|error| in_one_line(&error))?;
            }
            Ok(started.elapsed().as_secs_f64())
        };
        turn(&mut self.model)?;
        turn(&mut fixed)?;
        let mut pairs = Vec::new();
        for _ in 0..ABILITY_TURNS {
            pairs.push((turn(&mut self.model)?, turn(&mut fixed)?));
        }
        for (ours, fixed) in pairs {
            self.values.add(
                "time of a token, over whole layers that never changed",
                "ratio",
                ours / fixed,
            );
        }
        Ok(())
    }

    /// Measures decoding, also of the peer, while a busy thread occupies one of the available processors.
    pub(crate) fn neighbour(&mut self) -> Result<(), String> {
        let allowed = allowed_processors();
        let Some(&taken) = allowed.first() else {
            return Err("the system does not say which processors may be used".to_owned());
        };
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        let generate = self.settings.generate;
        let alone = self.decode(generate)?;
        let peer_alone = self.ask_decode()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let spinner = thread::spawn(move || {
            pin(taken);
            while !stopped.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let beside = self.decode(generate);
        let peer = self.ask_decode();
        stop.store(true, Ordering::Relaxed);
        spinner.join().ok();
        let (beside, peer) = (beside?, peer?);
        self.values.add(
            format!("decode, one of {} processors taken", allowed.len()),
            TOKENS,
            1.0 / beside,
        );
        self.values.add(
            "decode beside a neighbour, over alone",
            "ratio",
            alone / beside,
        );
        if let (Some(peer), Some(peer_alone)) = (peer, peer_alone) {
            self.values.add("peer beside a neighbour", TOKENS, peer);
            self.values.add(
                "peer beside a neighbour, over alone",
                "ratio",
                peer / peer_alone,
            );
        }
        Ok(())
    }

    /// Measures the time from opening the file to the first token with nothing resident, compared with one streamed
    /// pass.
    pub(crate) fn first_token(&mut self) -> Result<(), String> {
        let plan = EnginePlan {
            resident: std::collections::BTreeSet::new(),
            kv_capacity: Tokens::new(256),
            ..self.model.plan().clone()
        };
        let started = Instant::now();
        let mut model = self.another(&plan, Model::begin)?;
        let opened = started.elapsed();
        let mut pass = || -> Result<Duration, String> {
            let started = Instant::now();
            model
                .forward(&[1], &mut || Flow::Continue)
                .map_err(|error| in_one_line(&error))?;
            Ok(started.elapsed())
        };
        pass()?;
        let first = started.elapsed();
        pass()?;
        let passes = pass()?.saturating_add(pass()?) / 2;
        self.values.add(
            "opening, nothing resident",
            "ms",
            opened.as_secs_f64() * 1e3,
        );
        self.values.add(
            "first token after opening, nothing resident",
            "ms",
            first.as_secs_f64() * 1e3,
        );
        self.values.add(
            "first token over one streamed pass",
            "ratio",
            first.as_secs_f64() / passes.as_secs_f64(),
        );
        Ok(())
    }
}

fn allowed_processors() -> Vec<usize> {
    nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).map_or_else(
        |_| Vec::new(),
        |set| {
            (0..nix::sched::CpuSet::count())
                .filter(|&processor| set.is_set(processor).unwrap_or(false))
                .collect()
        },
    )
}

fn pin(processor: usize) {
    let mut set = nix::sched::CpuSet::new();
    if set.set(processor).is_ok() {
        nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).ok();
    }
}

/// Turns of the comparison with an engine that cannot stream, and tokens of each.
const ABILITY_TURNS: u32 = 9;
const ABILITY_TOKENS: u32 = 48;
