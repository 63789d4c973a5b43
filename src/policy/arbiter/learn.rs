//! Learned peaks, and the bookings derived from them.

use super::core::Arbiter;
use crate::{
    policy::{
        death::DeathCertificate,
        decision::WorkerDecision,
        event::Action,
        params::ENGINE_TENANT,
        worker::{Lesson, Worker},
    },
    units::Bytes,
};

impl Arbiter {
    /// Takes what the kernel remembers of a worker's life.
    pub(super) fn take_peak(&mut self, name: &str, peak: Bytes) {
        if self.state.workers.get_mut(name).is_some_and(|worker| worker.peaked(peak)) {
            self.learn_peak(name, peak);
        }
    }

    fn learn_peak(&mut self, name: &str, peak: Bytes) {
        let variant = self.state.workers.get(name).and_then(Worker::variant);
        if self.state.peaks.seen(name, variant, peak) {
            let configured = self.state.configured_peak(name, variant);
            if peak > configured {
                self.decide(WorkerDecision::PeakLearned {
                    worker: name.to_owned(),
                    variant: variant.map(str::to_owned),
                    peak,
                    configured,
                });
            }
            self.store_peaks();
        }
    }

    /// A worker that has come up and is measured at rest has shown what a start takes; and what it has come to use
    /// since, unless it is to end for that.
    pub(super) fn learn_from_life(&mut self, name: &str) {
        let Some(measured) = self.state.ledger.measurement(name) else {
            return;
        };
        let worker = self.state.workers.get_mut(name);
        match worker.and_then(|worker| worker.lesson(measured.at, self.state.params.shed.settle, self.state.now)) {
            Some(Lesson::Seen(peak)) => self.learn_peak(name, peak),
            Some(Lesson::Lived(peak)) => {
                let variant = self.state.workers.get(name).and_then(Worker::variant);
                if self.state.peaks.lived(name, variant, peak) {
                    self.store_peaks();
                }
            }
            None => {}
        }
    }

    /// A worker that was killed at the limit of its control group would have used more than was ever seen of it: what it
    /// had, or was expected to need, and as much again as one start may differ from the last.
    pub(super) fn learn_from_oom(&mut self, certificate: &DeathCertificate) {
        let name = certificate.worker.as_str();
        let Some(worker) = self.state.workers.get(name) else {
            return;
        };
        if worker.params.variants.len() > 1 {
            // Of which of its sizes it was is not known: the file counts.
            return;
        }
        let variant = worker.variant();
        let had = certificate.memory.history.iter().map(|point| point.used).max();
        let learned = self.state.peaks.of(name, variant).map(|peak| peak.bytes);
        let had = had.max(certificate.memory.peak_resident).max(learned);
        let had = had.unwrap_or_default().max(self.state.configured_peak(name, variant));
        let needs = had.saturating_add(had.per_mille(OOM_RAISE_PER_MILLE));
        if self.state.peaks.seen(name, variant, needs) {
            self.decide(WorkerDecision::PeakRaised { worker: name.to_owned(), had, needs });
            self.store_peaks();
        }
    }

    /// The engine's plans are exact; what it uses is learned for its model, to be seen.
    pub(super) fn learn_from_engine(&mut self) {
        let used = self.state.ledger.used_by(ENGINE_TENANT);
        let model = self.state.engine.shape().map(|shape| shape.name.clone());
        if let (Some(used), Some(model)) = (used, model)
            && self.state.peaks.seen(ENGINE_TENANT, Some(&model), used)
        {
            self.store_peaks();
        }
    }

    fn store_peaks(&mut self) {
        for worker in self.state.workers.values() {
            self.state.peaks.name_model(&worker.params.name, worker.params.model.as_deref());
        }
        let peaks = self.state.peaks.clone();
        self.out.push(Action::StorePeaks { peaks });
    }
}

/// The raise of the peak by a kill at the limit of a group. Our choice: more than the margin of a learned peak (10 %),
/// and four kills in a row double it.
const OOM_RAISE_PER_MILLE: u32 = 200;
