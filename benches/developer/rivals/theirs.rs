//! A rival's rule on the simulated device.

use std::collections::BTreeSet;

use super::device::{Device, load_time};
use super::rules::{
    CountLru, DeclaredSets, KeepAliveOrder, Resident, Rival, Room, ThresholdLru, View, Wanted,
};
use cotenant::units::Bytes;

const POLL_US: u64 = 100_000;

/// Returns all rivals, configured for this device as by a careful operator who knows the models, their peaks and their
/// transients, but not the neighbour.
pub(super) fn all(device: &Device<'_>, extra: Bytes) -> Vec<Box<dyn Rival>> {
    let sizes: Vec<(String, Bytes)> = device
        .holders
        .iter()
        .map(|holder| {
            let peak = Bytes::from_mib(holder.model.peak_mib).max(holder.steady);
            (holder.model.name.to_owned(), peak)
        })
        .collect();
    let room = device.budget().saturating_sub(extra);
    let fits = |set: &BTreeSet<String>| {
        let bytes = sizes
            .iter()
            .filter(|(name, _)| set.contains(name))
            .map(|(_, bytes)| *bytes);
        bytes.sum::<Bytes>() <= room
    };
    let mut sets: Vec<BTreeSet<String>> = (1u32..1 << sizes.len())
        .map(|bits| {
            let chosen = (0u32..)
                .zip(&sizes)
                .filter(|(index, _)| bits >> index & 1 == 1);
            chosen.map(|(_, (name, _))| name.clone()).collect()
        })
        .filter(fits)
        .collect();
    sets.sort_by_key(|set: &BTreeSet<String>| std::cmp::Reverse(set.len()));
    let mut largest: Vec<Bytes> = sizes.iter().map(|(_, bytes)| *bytes).collect();
    largest.sort_by_key(|bytes| std::cmp::Reverse(*bytes));
    let most = (1..=largest.len())
        .rev()
        .find(|count| largest.iter().take(*count).copied().sum::<Bytes>() <= room);
    vec![
        Box::new(CountLru::new(CountLru::DEFAULT)),
        Box::new(CountLru::new(most.unwrap_or(1))),
        Box::new(DeclaredSets::new(sets)),
        Box::new(ThresholdLru::local_ai()),
        Box::new(ThresholdLru::lemonade()),
        Box::new(KeepAliveOrder),
    ]
}

/// Runs the rule until the trace ends.
pub(super) fn run(device: &mut Device<'_>, rival: &mut dyn Rival) {
    // Every model is requested once before the first request, the LLM last.
    let mut preload: Vec<usize> = (0..device.holders.len()).collect();
    while !device.ended() {
        device.step();
        settle(device);
        // All their intervals are multiples of this.
        if device.now.as_micros().is_multiple_of(POLL_US) {
            for name in rival.poll(device.now, &view(device)) {
                unload(device, &name);
            }
        }
        let waiting = device
            .jobs
            .iter()
            .filter(|job| job.began.is_none())
            .map(|job| job.holder);
        let mut wanted: Vec<usize> = waiting.collect();
        if wanted.is_empty()
            && device
                .holders
                .iter()
                .all(|holder| holder.ready || holder.target == Bytes::ZERO)
        {
            wanted.extend(preload.pop());
        }
        for index in wanted {
            make_room(device, rival, index);
        }
        let ready: Vec<u64> = device
            .jobs
            .iter()
            .filter(|job| {
                job.began.is_none()
                    && device
                        .holders
                        .get(job.holder)
                        .is_some_and(|holder| holder.ready)
            })
            .map(|job| job.number)
            .collect();
        for number in ready {
            device.begin(number);
        }
    }
}

fn settle(device: &mut Device<'_>) {
    for holder in &mut device.holders {
        if !holder.ready && holder.target > Bytes::ZERO && holder.used == holder.target {
            holder.ready = true;
            holder.target = holder.steady;
        }
    }
}

fn make_room(device: &mut Device<'_>, rival: &mut dyn Rival, index: usize) {
    let Some(holder) = device.holders.get(index) else {
        return;
    };
    if holder.target > Bytes::ZERO {
        return;
    }
    let wanted = Wanted {
        name: holder.model.name.to_owned(),
        kind: holder.model.kind,
        bytes: holder.steady,
    };
    // At most every model is unloaded.
    for _ in 0..=device.holders.len() {
        match rival.make_room(&view(device), &wanted) {
            Room::Evict(names) => names.iter().for_each(|name| unload(device, name)),
            Room::Wait => return,
            Room::Load => {
                let leaving = device
                    .holders
                    .iter()
                    .any(|holder| holder.target == Bytes::ZERO && holder.used > Bytes::ZERO);
                if !(leaving && rival.waits_for_release()) {
                    device.load(index);
                }
                return;
            }
        }
    }
}

fn unload(device: &mut Device<'_>, name: &str) {
    if let Some(index) = device
        .holders
        .iter()
        .position(|holder| holder.model.name == name)
    {
        device.unload(index);
    }
}

fn view(device: &Device<'_>) -> View {
    let held = device
        .holders
        .iter()
        .enumerate()
        .filter(|(_, holder)| holder.target > Bytes::ZERO);
    let residents = held.map(|(index, holder)| Resident {
        name: holder.model.name.to_owned(),
        kind: holder.model.kind,
        used_at: holder.used_at,
        busy: !holder.ready || device.is_busy(index),
        load_time: load_time(holder.steady),
    });
    View {
        total: device.total,
        used: device.used(),
        residents: residents.collect(),
    }
}
