//! Latest death certificates.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use cotenant_policy::death::DeathCertificate;
use cotenant_units::lock::locked;

/// The last certificates of each worker, in memory; the journal has all.
#[derive(Debug)]
pub struct DeathLog {
    kept: Mutex<VecDeque<Arc<DeathCertificate>>>,
    per_worker: usize,
}

impl DeathLog {
    /// An empty log of the last `per_worker` certificates of each worker; the bound is per worker, so that a crash loop
    /// does not evict those of others.
    pub fn new(per_worker: usize) -> Self {
        Self {
            kept: Mutex::default(),
            per_worker: per_worker.max(1),
        }
    }

    /// Adds a certificate, and drops the oldest of the worker above the bound.
    pub fn push(&self, certificate: DeathCertificate) {
        let mut kept = locked(&self.kept);
        let same = |known: &Arc<DeathCertificate>| known.worker == certificate.worker;
        if kept.iter().filter(|known| same(known)).count() >= self.per_worker
            && let Some(oldest) = kept.iter().position(same)
        {
            kept.remove(oldest);
        }
        kept.push_back(Arc::new(certificate));
    }

    /// At most `limit` certificates, the latest first, of one worker or of all.
    pub fn last(&self, worker: Option<&str>, limit: usize) -> Vec<Arc<DeathCertificate>> {
        let kept = locked(&self.kept);
        kept.iter()
            .rev()
            .filter(|certificate| worker.is_none_or(|worker| certificate.worker == worker))
            .take(limit)
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(worker: &str, start: u64) -> DeathCertificate {
        DeathCertificate {
            worker: worker.to_owned(),
            start,
            ..DeathCertificate::default()
        }
    }

    #[test]
    fn each_worker_keeps_its_last_ones() {
        let log = DeathLog::new(2);
        log.push(certificate("tts", 1));
        for start in 1..=5 {
            log.push(certificate("asr", start));
        }
        let found = |worker: Option<&str>, limit| -> Vec<(String, u64)> {
            let last = log.last(worker, limit);
            last.iter()
                .map(|death| (death.worker.clone(), death.start))
                .collect()
        };
        assert_eq!(
            found(None, 10),
            [
                ("asr".to_owned(), 5),
                ("asr".to_owned(), 4),
                ("tts".to_owned(), 1)
            ]
        );
        assert_eq!(found(Some("asr"), 1), [("asr".to_owned(), 5)]);
        assert!(found(Some("none"), 9).is_empty());
    }
}
