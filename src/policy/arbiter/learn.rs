//! Learned peaks, and the bookings derived from them.

use super::context::Context;
use crate::{
    death::DeathCertificate,
    decision::WorkerDecision,
    event::Action,
    params::ENGINE_TENANT,
    worker::{Lesson, Worker},
};
use cotenant_units::Bytes;

/// Takes what the kernel remembers of a worker's life.
pub(super) fn take_peak(cx: &mut Context<'_>, name: &str, peak: Bytes) {
    if cx
        .workers
        .get_mut(name)
        .is_some_and(|worker| worker.peaked(peak))
    {
        learn_peak(cx, name, peak);
    }
}

fn learn_peak(cx: &mut Context<'_>, name: &str, peak: Bytes) {
    let variant = cx.state.workers.get(name).and_then(Worker::variant);
    if cx.state.peaks.seen(name, variant, peak) {
        let configured = cx.configured_peak(name, variant);
        if peak > configured {
            cx.decide(WorkerDecision::PeakLearned {
                worker: name.to_owned(),
                variant: variant.map(str::to_owned),
                peak,
                configured,
            });
        }
        store_peaks(cx);
    }
}

/// A worker that has come up and is measured at rest has shown what a start takes; and what it has come to use
/// since, unless it is to end for that.
pub(super) fn from_life(cx: &mut Context<'_>, name: &str) {
    let Some(measured) = cx.ledger.measurement(name) else {
        return;
    };
    let worker = cx.state.workers.get_mut(name);
    match worker
        .and_then(|worker| worker.lesson(measured.at, cx.state.params.shed.settle, cx.state.now))
    {
        Some(Lesson::Seen(peak)) => learn_peak(cx, name, peak),
        Some(Lesson::Lived(peak)) => {
            let variant = cx.state.workers.get(name).and_then(Worker::variant);
            let first = cx
                .peaks
                .of(name, variant)
                .is_none_or(|peak| peak.lives == 0);
            if cx.state.peaks.lived(name, variant, peak) {
                if first && worker_is_auto(cx, name) {
                    let (worker, variant) = (name.to_owned(), variant.map(str::to_owned));
                    let reserved = cx.configured_peak(name, variant.as_deref());
                    cx.decide(WorkerDecision::PeakLearned {
                        worker,
                        variant,
                        peak,
                        configured: reserved,
                    });
                }
                store_peaks(cx);
            }
        }
        None => {}
    }
}

fn worker_is_auto(cx: &Context<'_>, name: &str) -> bool {
    cx.workers
        .get(name)
        .is_some_and(|worker| worker.params.rest.auto)
}

/// A worker that was killed at the limit of its control group would have used more than was ever seen of it: what it
/// had, or was expected to need, and as much again as one start may differ from the last.
pub(super) fn from_oom(cx: &mut Context<'_>, certificate: &DeathCertificate) {
    let name = certificate.worker.as_str();
    let Some(worker) = cx.state.workers.get(name) else {
        return;
    };
    if worker.params.variants.len() > 1 {
        // Of which of its sizes it was is not known: the file counts.
        return;
    }
    let variant = worker.variant();
    let had = certificate
        .memory
        .history
        .iter()
        .map(|point| point.used)
        .max();
    let learned = cx.peaks.of(name, variant).map(|peak| peak.bytes);
    let had = had.max(certificate.memory.peak_resident).max(learned);
    let had = had
        .unwrap_or_default()
        .max(cx.configured_peak(name, variant));
    let needs = had.saturating_add(had.per_mille(OOM_RAISE_PER_MILLE));
    if cx.state.peaks.seen(name, variant, needs) {
        cx.decide(WorkerDecision::PeakRaised {
            worker: name.to_owned(),
            had,
            needs,
        });
        store_peaks(cx);
    }
}

/// The engine's plans are exact; what it uses is learned for its model, to be seen. Memory that no token has touched is not used.
pub(super) fn from_engine(cx: &mut Context<'_>) {
    let untouched = cx.engine.kv.untouched;
    let used = cx.ledger.used_by(ENGINE_TENANT);
    let used = used.map(|used| used.saturating_sub(untouched));
    let model = cx.engine.shape().map(|shape| shape.name.clone());
    if let (Some(used), Some(model)) = (used, model)
        && cx.peaks.seen(ENGINE_TENANT, Some(&model), used)
    {
        store_peaks(cx);
    }
}

fn store_peaks(cx: &mut Context<'_>) {
    for worker in cx.state.workers.values() {
        cx.state
            .peaks
            .name_model(&worker.params.name, worker.params.model.as_deref());
    }
    let peaks = cx.peaks.clone();
    cx.out.push(Action::StorePeaks { peaks });
}

/// The raise of the peak by a kill at the limit of a group. Our choice: more than the margin of a learned peak (10 %),
/// and four kills in a row double it.
const OOM_RAISE_PER_MILLE: u32 = 200;
