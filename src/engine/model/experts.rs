//! Experts of a mixture in memory: the rooms of each layer hold those that were used last.
//!
//! ```text
//!   parts of layer 7   │ 3 │ 19 │ 4 │ 88 │   │ 12 │ 13 │ 14 │ 15 │   … the parts of the plan, resident or not
//!   staging            │ 40 │ 71 │ … │        one room for each expert of a token
//! ```
//!
//! The plan decides how many rooms a layer has; which experts are in them is decided here, token by token. A token that
//! needs an expert without a room has it read to staging, computes with it there, and leaves it in the room that has not
//! been used for longest.

use std::{ops::Range, path::Path, sync::Arc, time::Instant};

use crate::{
    backend::{Buffer, View},
    disk::{DiskTimeout, Retained},
    error::ReadError,
    reader::{Extent, Fetcher, Missing, Source, Wanted},
    shape::{ExpertLayout, ExpertRooms},
};

/// Contents of all rooms.
pub(super) struct Experts {
    layers: Vec<Rooms>,
    staging: Buffer,
    fetcher: Option<Fetcher>,
    /// Rooms of staging that no request uses.
    free: Vec<usize>,
    /// Number of uses so far.
    clock: u64,
    /// Number of experts read so far because a token needed them.
    reads: u64,
}

/// Experts of a mixture, and where they were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCounts {
    /// Experts of all layers.
    pub total: usize,
    /// Those of them in memory.
    pub resident: usize,
    /// Uses of experts that were in memory.
    pub found: u64,
    /// Uses for which they were read.
    pub read: u64,
}

/// Rooms of one layer.
struct Rooms {
    parts: Range<usize>,
    each: usize,
    /// Of each room, the expert in it and its last use.
    contents: Vec<Option<(usize, u64)>>,
}

impl Experts {
    /// Creates empty rooms, and `staging` for the experts of one token.
    pub(super) fn new(layout: &ExpertLayout, staging: Buffer) -> Self {
        let rooms = |rooms: &ExpertRooms| Rooms {
            parts: rooms.parts.clone(),
            each: rooms.each,
            contents: vec![None; rooms.extents.len()],
        };
        Self {
            layers: layout.layers.iter().map(rooms).collect(),
            staging,
            fetcher: None,
            free: (0..layout.staged).collect(),
            clock: 0,
            reads: 0,
        }
    }

    pub(super) fn counts(&self) -> ExpertCounts {
        let rooms = || self.layers.iter().flat_map(|rooms| &rooms.contents);
        ExpertCounts {
            total: rooms().count(),
            resident: rooms().flatten().count(),
            found: self.clock,
            read: self.reads,
        }
    }

    pub(super) const fn staging(&self) -> &Buffer {
        &self.staging
    }

    fn rooms_of(&mut self, part: usize) -> Option<(&mut Rooms, Range<usize>)> {
        let mut layers = self.layers.iter_mut();
        let rooms = layers.find(|rooms| rooms.parts.contains(&part))?;
        let first = (part - rooms.parts.start) * rooms.each;
        let end = rooms.contents.len().min(first + rooms.each);
        Some((rooms, first..end))
    }

    /// Notes that a part was read with the experts of the same numbers as its rooms.
    pub(super) fn filled(&mut self, part: usize) {
        let clock = self.clock;
        if let Some((rooms, range)) = self.rooms_of(part) {
            for number in range {
                // Those that have another room leave this one to the next.
                let elsewhere = rooms.find(number).is_some();
                if let Some(room) = rooms.contents.get_mut(number) {
                    *room = (!elsewhere).then_some((number, clock));
                }
            }
        }
    }

    /// Notes that a part was released.
    pub(super) fn released(&mut self, part: usize) {
        if let Some((rooms, range)) = self.rooms_of(part)
            && let Some(contents) = rooms.contents.get_mut(range)
        {
            contents.fill(None);
        }
    }

    /// Returns the room of an expert, and notes its use.
    pub(super) fn use_room(&mut self, layer: usize, expert: usize) -> Option<usize> {
        let rooms = self.layers.get_mut(layer)?;
        let room = rooms.find(expert)?;
        self.clock += 1;
        *rooms.contents.get_mut(room)? = Some((expert, self.clock));
        Some(room)
    }

    /// Whether an expert has a room.
    pub(super) fn has(&self, layer: usize, expert: usize) -> bool {
        self.layers
            .get(layer)
            .is_some_and(|rooms| rooms.find(expert).is_some())
    }

    /// Takes the room of resident parts that is empty or was used before all others and before `since`; the expert there
    /// is forgotten.
    pub(super) fn take_room(
        &mut self,
        layer: usize,
        since: u64,
        is_resident: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let rooms = self.layers.get_mut(layer)?;
        let (parts, each) = (rooms.parts.clone(), rooms.each);
        let of_resident = |room: &usize| is_resident(parts.start + room / each);
        let last_use = |room: &usize| rooms.contents.get(*room).copied().flatten();
        let oldest = (0..rooms.contents.len())
            .filter(of_resident)
            .min_by_key(|room| last_use(room).map(|(_, used)| used))?;
        if last_use(&oldest).is_some_and(|(_, used)| used > since) {
            return None;
        }
        *rooms.contents.get_mut(oldest)? = None;
        Some(oldest)
    }

    /// Notes the expert that was copied to a room.
    pub(super) fn keep(&mut self, layer: usize, room: usize, expert: usize) {
        let clock = self.clock;
        let rooms = self.layers.get_mut(layer);
        if let Some(room) = rooms.and_then(|rooms| rooms.contents.get_mut(room)) {
            *room = Some((expert, clock));
        }
    }

    /// Number of uses so far: what is used from now on has a higher one.
    pub(super) const fn clock(&self) -> u64 {
        self.clock
    }

    /// Part of a room, and its number there.
    pub(super) fn place(&self, layer: usize, room: usize) -> Option<(usize, usize)> {
        let rooms = self.layers.get(layer)?;
        Some((rooms.parts.start + room / rooms.each, room % rooms.each))
    }

    /// Requests an expert; returns its room in staging, or `None` if all are in use.
    pub(super) fn ask(
        &mut self,
        source: &Arc<dyn Source>,
        layout: &ExpertLayout,
        (layer, expert): (usize, usize),
    ) -> Result<Option<usize>, Missing> {
        let Some(room) = self.free.pop() else {
            return Ok(None);
        };
        let fetcher = match self.fetcher.take() {
            Some(fetcher) => fetcher,
            None => Fetcher::start(Arc::clone(source), Arc::clone(self.staging.shared()))
                .map_err(|error| Missing::Failed(no_reader(layout, layer, expert, &error)))?,
        };
        let rooms = layout.layers.get(layer);
        let extents = rooms.and_then(|rooms| rooms.extents.get(expert).zip(Some(&rooms.places)));
        let extents = extents.into_iter().flat_map(|(extents, places)| {
            let place = move |(_, offset): &(usize, usize)| room * layout.room + offset;
            extents.iter().cloned().zip(places.iter().map(place))
        });
        fetcher.ask(Wanted {
            number: room,
            extents: extents.collect(),
        });
        self.reads += 1;
        self.fetcher = Some(fetcher);
        Ok(Some(room))
    }

    /// Waits for a room of staging, as [`Fetcher::wait`].
    pub(super) fn wait(
        &self,
        room: usize,
        limit: DiskTimeout,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<(), Missing> {
        let fetcher = self.fetcher.as_ref();
        fetcher.map_or(Err(Missing::Stopped), |fetcher| {
            fetcher.wait(room, limit, patience)
        })
    }

    /// Returns a room of staging.
    pub(super) fn free(&mut self, room: usize) {
        self.free.push(room);
    }

    /// Ends what requests a pass has left, before another one begins.
    pub(super) fn begin(
        &mut self,
        layout: &ExpertLayout,
        limit: DiskTimeout,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<(), Missing> {
        if self.free.len() == layout.staged {
            return Ok(());
        }
        if let Some(fetcher) = &self.fetcher {
            fetcher.withdraw(limit, patience)?;
        }
        self.free = (0..layout.staged).collect();
        Ok(())
    }

    /// Memory that hanging reads would keep if the model were dropped.
    pub(super) fn kept(&self, began: Instant) -> Retained {
        let reads = self.fetcher.as_ref().map(|_| self.staging.mark());
        Retained::of(reads, began)
    }

    /// View of `len` bytes in a room of staging.
    pub(super) fn staged(
        &self,
        layout: &ExpertLayout,
        room: usize,
        (at, len): (usize, usize),
    ) -> View {
        self.staging.view_bytes(room * layout.room + at, len)
    }
}

impl Rooms {
    fn find(&self, expert: usize) -> Option<usize> {
        let is_here = |room: &Option<(usize, u64)>| room.is_some_and(|(here, _)| here == expert);
        self.contents.iter().position(is_here)
    }
}

fn no_reader(
    layout: &ExpertLayout,
    layer: usize,
    expert: usize,
    error: &std::io::Error,
) -> ReadError {
    let rooms = layout.layers.get(layer);
    let extent = rooms.and_then(|rooms| rooms.extents.get(expert)?.first());
    let problem = format!("its reader cannot be started: {error}");
    let extent = extent.cloned().unwrap_or_else(|| Extent {
        what: "experts".into(),
        offset: 0,
        bytes: 0,
    });
    extent.error(Path::new(""), problem)
}
