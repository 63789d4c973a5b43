//! Learned peaks, and the reservations derived from them.

use super::context::Context;
use crate::{
    death::DeathCertificate, decision::WorkerDecision, event::Action, params::ENGINE_TENANT,
    worker::Lesson,
};
use cotenant_units::Bytes;

/// Applies the kernel's high water of a worker's life.
pub(super) fn take_peak(cx: &mut Context<'_>, name: &str, peak: Bytes) {
    let worker = cx.workers.get_mut(name);
    if worker.is_some_and(|worker| worker.peaked(peak)) {
        learn(cx, name, Lesson::Seen(peak));
    }
}

/// Learns from a worker that is ready and measured at rest: the need of a start, or growth since then, unless it is to
/// end for that growth.
pub(super) fn from_life(cx: &mut Context<'_>, name: &str) {
    let (settle, now) = (cx.params.shed.settle, cx.now);
    let measured = cx.ledger.measurement(name);
    let lesson = measured
        .zip(cx.workers.get_mut(name))
        .and_then(|(measured, worker)| worker.lesson(measured.at, settle, now));
    if let Some(lesson) = lesson {
        learn(cx, name, lesson);
    }
}

fn learn(cx: &mut Context<'_>, name: &str, lesson: Lesson) {
    let Some(worker) = cx.workers.get(name) else {
        return;
    };
    let (auto, variant) = (worker.params.rest.auto, worker.variant().map(str::to_owned));
    let known = variant.as_deref();
    let configured = cx.configured_peak(name, known);
    let (peak, is_learned, is_news) = match lesson {
        Lesson::Seen(peak) => {
            let learned = cx.peaks.seen(name, known, peak);
            (peak, learned, peak > configured)
        }
        Lesson::Lived(peak) => {
            let before = cx.peaks.of(name, known);
            let is_first = before.is_none_or(|before| before.lives == 0);
            let learned = cx.peaks.lived(name, known, peak);
            (peak, learned, is_first && auto)
        }
    };
    if is_learned && is_news {
        cx.decide(WorkerDecision::PeakLearned {
            worker: name.to_owned(),
            variant,
            peak,
            configured,
        });
    }
    if is_learned {
        store_peaks(cx);
    }
}

/// Raises the peak of a worker that was killed at the limit of its control group, since its need exceeds every
/// measurement: the highest of its measured, learned and configured peaks, plus `OOM_RAISE_PER_MILLE`.
pub(super) fn from_oom(cx: &mut Context<'_>, certificate: &DeathCertificate) {
    let name = certificate.worker.as_str();
    let Some(worker) = cx.state.workers.get(name) else {
        return;
    };
    if worker.params.variants.len() > 1 {
        // The variant is unknown: the configuration applies.
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

/// Learns the engine's use for its model, for display only, since plans are exact. Untouched memory does not count as
/// used.
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

/// Raise of the peak after a kill at the limit of a group. Our choice: more than the margin of a learned peak (10 %),
/// and four kills in a row double it.
const OOM_RAISE_PER_MILLE: u32 = 200;
