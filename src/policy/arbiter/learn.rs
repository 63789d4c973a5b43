//! Learned peaks, and the bookings derived from them.

use super::{core::Arbiter, worker::Worker, worker_rest::Growth};
use crate::{
    policy::{death::DeathCertificate, event::Action, params::ENGINE_TENANT, snapshot::WorkerState},
    units::Bytes,
};

impl Arbiter {
    /// Takes what the kernel remembers of a worker's life.
    pub(super) fn take_peak(&mut self, name: &str, peak: Bytes) {
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        let runs = matches!(worker.state, WorkerState::Starting | WorkerState::Ready);
        if !runs || worker.resizing.is_some() {
            // Between two sizes nobody knows of which one it is the peak.
            return;
        }
        worker.peak_seen = worker.peak_seen.max(Some(peak));
        if std::mem::take(&mut worker.peak_is_of_others) {
            worker.peak_of_others = worker.peak_of_others.max(Some(peak));
        }
        if worker.peak_of_others >= Some(peak) {
            return;
        }
        if worker.may_have_outgrown(peak) {
            // With the next measurement it is known whether that stays.
            return;
        }
        self.learn_peak(name, peak);
    }

    fn learn_peak(&mut self, name: &str, peak: Bytes) {
        let variant = self.workers.get(name).and_then(|worker| worker.variant.clone());
        if self.peaks.seen(name, variant.as_deref(), peak) {
            let configured = self.configured_peak(name, variant.as_deref());
            if peak > configured {
                let variant = variant.map_or_else(String::new, |variant| format!(" in variant `{variant}`"));
                self.explain(format!(
                    "worker `{name}` used {peak}{variant}, and is set to need {configured} at most: from now on its own peak counts"
                ));
            }
            self.store_peaks();
        }
    }

    /// A worker that has come up and is measured at rest has shown what a start takes; and what it has come to use
    /// since, unless it is to end for that.
    pub(super) fn learn_from_life(&mut self, name: &str) {
        let growth = self.growth_of(name);
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        let settled = self
            .ledger
            .measurement(name)
            .is_some_and(|measured| worker.state == WorkerState::Ready && measured.at >= worker.state_since);
        // Without the kernel's memory of it nobody knows what happened between two measurements.
        let Some(peak) = worker.peak_seen.filter(|_| settled) else {
            return;
        };
        if worker.may_have_outgrown(peak) {
            if growth == Growth::Stays && worker.peak_of_others < Some(peak) {
                self.learn_peak(name, peak);
            }
            return;
        }
        if std::mem::replace(&mut worker.peak_counted, true) || worker.rest.taken_over_at.is_some() {
            // A process that was taken over has lived once, however many supervisors it has seen.
            return;
        }
        let variant = worker.variant.clone();
        if self.peaks.lived(name, variant.as_deref(), peak) {
            self.store_peaks();
        }
    }

    /// A worker that was killed at the limit of its control group would have used more than was ever seen of it: what it
    /// had, or was expected to need, and as much again as one start may differ from the last.
    pub(super) fn learn_from_oom(&mut self, certificate: &DeathCertificate) {
        let name = certificate.worker.as_str();
        let Some(worker) = self.workers.get(name) else {
            return;
        };
        if worker.params.variants.len() > 1 {
            // Of which of its sizes it was is not known: the file counts.
            return;
        }
        let variant = worker.variant.clone();
        let had = certificate.history.iter().map(|point| point.used).max();
        let learned = self.peaks.of(name, variant.as_deref()).map(|peak| peak.bytes);
        let had = had.max(certificate.peak_resident).max(learned);
        let had = had
            .unwrap_or_default()
            .max(self.configured_peak(name, variant.as_deref()));
        let more = had.saturating_add(had.per_mille(OOM_RAISE_PER_MILLE));
        if self.peaks.seen(name, variant.as_deref(), more) {
            self.explain(format!(
                "worker `{name}` was killed at the limit of its group with {had}: from now on {more} has to be free for it"
            ));
            self.store_peaks();
        }
    }

    /// The engine's plans are exact; what it uses is learned for its model, to be seen.
    pub(super) fn learn_from_engine(&mut self) {
        let used = self.ledger.measurement(ENGINE_TENANT).map(|measured| measured.used);
        let model = self.engine.shape().map(|shape| shape.name.clone());
        if let (Some(used), Some(model)) = (used, model)
            && self.peaks.seen(ENGINE_TENANT, Some(&model), used)
        {
            self.store_peaks();
        }
    }

    /// What has to be free for a worker to get into a variant: what it is set to need, or what it was seen to need.
    pub(super) fn worker_peak(&self, name: &str, variant: Option<&str>) -> Bytes {
        let Some(worker) = self.workers.get(name) else {
            return Bytes::ZERO;
        };
        let variants = &worker.params.variants;
        let known = variants.iter().find(|known| Some(known.name.as_str()) == variant);
        let variant = known.or_else(|| variants.first()).map(|known| known.name.as_str());
        let (configured, steady) = (worker.params.peak_of(variant), worker.params.steady_of(variant));
        // What was seen beyond the budget was seen without it: nobody waits for what can never be.
        let expected = self.peaks.expected(name, variant, configured, steady);
        expected.min(self.ledger.budget().max(configured))
    }

    fn configured_peak(&self, name: &str, variant: Option<&str>) -> Bytes {
        let worker = self.workers.get(name);
        worker.map_or(Bytes::ZERO, |worker| worker.params.peak_of(variant))
    }

    fn store_peaks(&mut self) {
        for worker in self.workers.values() {
            self.peaks
                .name_model(&worker.params.name, worker.params.model.as_deref());
        }
        let peaks = self.peaks.clone();
        self.out.push(Action::StorePeaks { peaks });
    }
}

impl Worker {
    /// Whether a peak may be one that it has grown to beyond its bounds since it was started, which says nothing of what
    /// a start takes: of a process that was taken over, nobody knows when it was.
    fn may_have_outgrown(&self, peak: Bytes) -> bool {
        let since_its_start = self.peak_counted || self.rest.taken_over_at.is_some();
        since_its_start && self.params.recycle_above.is_some_and(|above| peak > above)
    }
}

/// What a kill at the limit of a group raises the peak by. Our choice: more than the margin of a learned peak (10 %), and
/// four kills in a row double it.
const OOM_RAISE_PER_MILLE: u32 = 200;
