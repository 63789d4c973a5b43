//! Histories through the daemon's journal: written, rotated, dropped, read and replayed.

use std::{
    fs,
    path::Path,
    sync::mpsc::{Receiver, channel},
    time::UNIX_EPOCH,
};

use cotenant::{
    journal::{self, Content, Journal, JournalSettings, Outcome},
    units::Bytes,
};

use crate::world::World;

const FILE_MAX: Bytes = Bytes::from_kib(256);

/// A history written in the daemon's way.
struct Written {
    world: World,
    journal: Journal,
    seen: Receiver<u64>,
}

impl Written {
    fn new(seed: u64, path: &Path, queue_max: usize) -> Self {
        let world = World::new(seed, None);
        let settings = JournalSettings {
            path: Some(path.to_owned()),
            file_max: FILE_MAX,
            files_kept: 3,
            queue_max,
        };
        let (tell, seen) = channel();
        let mut journal = Journal::open(&settings, &format!("seed {seed}"), move |entry, _| {
            let _ = tell.send(entry.sequence);
        })
        .unwrap();
        journal.record(
            world.now,
            UNIX_EPOCH,
            Content::start(world.device.params.clone()),
        );
        Self {
            world,
            journal,
            seen,
        }
    }

    fn step(&mut self) {
        let event = self.world.next_event();
        let now = self.world.now;
        if self.journal.wants_checkpoint() {
            let checkpoint = Box::new(self.world.arbiter.checkpoint());
            self.journal
                .record(now, UNIX_EPOCH, Content::Checkpoint(checkpoint));
        }
        self.journal
            .record(now, UNIX_EPOCH, Content::Event(event.clone()));
        let actions = self.world.arbiter.handle(now, event);
        for action in &actions {
            self.journal
                .record(now, UNIX_EPOCH, Content::Action(action.clone()));
        }
        self.world.perform(&actions);
    }

    /// Waits until the writer has processed everything.
    fn catch_up(&self) {
        let last = self.journal.last_sequence();
        // Dropped lines are never seen, so the last sequence number may be smaller.
        while let Ok(sequence) = self
            .seen
            .recv_timeout(std::time::Duration::from_millis(200))
        {
            if sequence == last {
                break;
            }
        }
    }
}

/// All files of a journal, newest first.
fn files(path: &Path) -> Vec<std::path::PathBuf> {
    let aside = |number: u32| path.with_file_name(format!("journal.ndjson.{number}"));
    std::iter::once(path.to_owned())
        .chain((1..).map(aside))
        .take_while(|path| path.exists())
        .collect()
}

#[test]
fn every_file_that_was_put_aside_replays_alone_and_the_disk_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal.ndjson");
    let mut written = Written::new(7, &path, 4096);
    for _ in 0..8000 {
        written.step();
        written.catch_up();
    }
    drop(written);
    let files = files(&path);
    assert_eq!(files.len(), 4, "three are kept beside the one in use");
    let mut all = Vec::new();
    for file in files.iter().rev() {
        assert!(
            fs::metadata(file).unwrap().len() <= FILE_MAX.get(),
            "{}",
            file.display()
        );
        let contents = journal::read(file).unwrap();
        assert!(matches!(
            contents.entries[0].content,
            Content::Checkpoint(_)
        ));
        let runs = journal::replay(&contents.entries);
        assert_eq!(runs.len(), 1);
        assert_eq!(runs[0].outcome, Outcome::Same);
        assert_eq!(runs[0].skipped, 0, "{:?}", runs[0]);
        // The current one may have been started just now.
        assert!(runs[0].events > 20 || *file == path, "{:?}", runs[0]);
        all.extend(contents.entries);
    }
    // In succession they form one run, whose state at each boundary is the written one.
    let runs = journal::replay(&all);
    assert_eq!((&runs[0].outcome, runs[0].gaps), (&Outcome::Same, 0));
    assert!(
        runs[0].checkpoints >= 3,
        "at each seam at least: {:?}",
        runs[0]
    );
}

#[test]
fn what_a_busy_disk_does_not_take_is_a_gap_and_the_rest_replays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal.ndjson");
    let mut written = Written::new(11, &path, 8);
    for _ in 0..3000 {
        written.step();
    }
    written.catch_up();
    written.step();
    let (dropped, failed) = written.journal.lost();
    let last = written.journal.last_sequence();
    drop(written);
    assert_eq!(failed, 0);
    let entries: Vec<_> = files(&path)
        .iter()
        .rev()
        .flat_map(|file| journal::read(file).unwrap().entries)
        .collect();
    let reported: u64 = entries
        .iter()
        .map(|entry| match &entry.content {
            Content::Dropped { lines } => *lines,
            _ => 0,
        })
        .sum();
    assert!(reported <= dropped && last > 3000);
    let runs = journal::replay(&entries);
    let run = &runs[0];
    // However many lines the writer dropped, every decision in the written ones replays identically.
    assert!(
        matches!(run.outcome, Outcome::Same | Outcome::Gap { .. }),
        "{:?}",
        run.outcome
    );
    assert!(reported == 0 || run.gaps > 0 || matches!(run.outcome, Outcome::Gap { .. }));
}
