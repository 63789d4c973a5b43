//! Actions of tenants, and delivery of their messages.

use std::time::Duration;

use cotenant::{
    policy::{
        denial::Denial,
        event::{Answer, Event, LeaseCall, LeaseResize, TargetAnswered},
        lease::{LeaseId, LeaseRequest, Target, TargetAnswer, Ticket},
    },
    rpc::target::Verdict,
    units::{Bytes, Timestamp},
};
use rand::Rng;

use super::{Happening, World};
use crate::{
    device::{CLASSES, millis},
    tenant::{Manners, Tenant},
};

impl World {
    pub(super) fn tenant_turn(&mut self, index: usize) -> Option<Event> {
        let wait = millis(&mut self.rng, 20, 900);
        self.after(wait, Happening::TenantTurn(index));
        let crashes = self.faults.crashing_tenants.strikes(&mut self.rng, 0.03);
        if crashes {
            self.kill_tenant(index);
            return None;
        }
        let (calm, now) = (self.calm, self.now);
        let tenant = &mut self.tenants[index];
        if !tenant.alive {
            tenant.begin_again();
            return None;
        }
        // Without messages from the supervisor for a term it ends as if notified.
        if tenant.lease.is_some() && !tenant.relies(now) && !self.leaving.contains(&index) {
            self.tenant_hears_end(index);
            return None;
        }
        let tenant = &mut self.tenants[index];
        let again = tenant.hasty && !tenant.asking.is_empty() && tenant.lease.is_some();
        let again = again
            && self
                .letters
                .as_mut()
                .is_some_and(|letters| letters.random_bool(0.4));
        if (!tenant.asking.is_empty() && !again) || self.leaving.contains(&index) {
            return None;
        }
        let Some(lease) = tenant.lease.clone() else {
            return if calm { None } else { self.tenant_asks(index) };
        };
        tenant.use_memory(&mut self.rng);
        let peer = tenant.peer();
        if calm || self.rng.random_bool(0.15) {
            // Releases the memory first, as an honest holder does.
            if self.tenants[index].manners == Manners::Honest {
                self.tenants[index].used = Bytes::ZERO;
            }
            self.tenants[index].lease = None;
            self.tenants[index].may_use = Bytes::ZERO;
            let ticket = self.ticket();
            return Some(Event::LeaseReleased(LeaseCall {
                ticket,
                lease: lease.id,
                generation: lease.generation,
                peer,
            }));
        }
        if self.tenants[index].manners == Manners::Silent && self.rng.random_bool(0.5) {
            return None;
        }
        let ticket = self.ticket();
        if again || (self.rng.random_bool(0.25) && lease.target.is_none()) {
            let budget = self.device.params.budget.bytes();
            let mut min = self
                .rng
                .random_range(1..=lease.memory.max.min(budget).get());
            let mut max = self.rng.random_range(min..=min * 2);
            let may_use = self.tenants[index].may_use;
            if self.tenants[index].hasty && Bytes::ZERO < may_use && may_use < lease.memory.held {
                // It has been asked to come down, and asks for that or less.
                max = self.rng.random_range(1..=may_use.get());
                min = self.rng.random_range(1..=max);
            }
            let tenant = &mut self.tenants[index];
            if Bytes::new(max) < lease.memory.held {
                if tenant.manners == Manners::Honest {
                    tenant.come_down(Bytes::new(max));
                }
                tenant.may_use = tenant.may_use.min(Bytes::new(max));
            }
            tenant.asking.insert(ticket);
            let wait = millis(&mut self.rng, 0, 2000);
            return Some(Event::LeaseResizeRequested(LeaseResize {
                ticket,
                lease: lease.id,
                generation: lease.generation,
                peer,
                min: Bytes::new(min),
                max: Bytes::new(max),
                wait,
            }));
        }
        self.tenants[index].asking.insert(ticket);
        Some(Event::LeaseRenewed(LeaseCall {
            ticket,
            lease: lease.id,
            generation: lease.generation
                + u64::from(self.faults.strange_requests.strikes(&mut self.rng, 0.02)),
            peer,
        }))
    }

    pub(super) fn tenant_asks(&mut self, index: usize) -> Option<Event> {
        let ticket = self.ticket();
        let budget = self.device.params.budget.bytes().get();
        let strange = self.faults.strange_requests.strikes(&mut self.rng, 0.2);
        let tenant = &mut self.tenants[index];
        tenant.requests += 1;
        let most = if self.rng.random_bool(0.1) {
            budget * 2
        } else {
            budget / 3
        };
        let min = self.rng.random_range(1..most);
        let mut request = LeaseRequest {
            tenant: tenant.name.clone(),
            request_id: match tenant.pid {
                Some(pid) => format!("{pid}-{}", tenant.requests / 2),
                None => format!("{}", tenant.requests / 2),
            },
            peer: tenant.peer(),
            class: CLASSES[self.rng.random_range(0..4)],
            min: Bytes::new(min),
            max: Bytes::new(self.rng.random_range(min..=min * 3)),
            term: Some(millis(&mut self.rng, 2000, 5000)),
            wait: if self.rng.random_bool(0.3) {
                Duration::ZERO
            } else {
                millis(&mut self.rng, 1, 6000)
            },
            validate_only: self.rng.random_bool(0.05),
            cgroup: None,
        };
        if strange {
            match self.rng.random_range(0..6) {
                0 => request.min = Bytes::ZERO,
                1 => request.max = Bytes::MAX,
                2 => request.min = Bytes::MAX,
                3 => request.tenant = "llm".to_owned(),
                4 => request.term = Some(Duration::MAX),
                _ => request.request_id = "x".repeat(4096),
            }
        }
        tenant.asking.insert(ticket);
        if self.faults.cancelled_requests.strikes(&mut self.rng, 0.2) {
            let wait = millis(&mut self.rng, 1, 1000);
            self.after(
                wait,
                Happening::Deliver(Box::new(Event::LeaseRequestCancelled { ticket })),
            );
            // Its caller is gone: a lease granted afterwards expires.
            self.tenants[index].asking.clear();
        }
        Some(Event::LeaseRequested { ticket, request })
    }

    pub(super) fn take_answer(&mut self, ticket: Ticket, answer: &Answer) {
        let asking = |tenant: &Tenant| tenant.asking.contains(&ticket);
        let Some(index) = self.tenants.iter().position(asking) else {
            return;
        };
        let tenant = &mut self.tenants[index];
        tenant.asking.remove(&ticket);
        match answer {
            Answer::Lease { lease } => {
                tenant.may_use = lease.target.as_ref().map_or(lease.memory.held, |target| {
                    target.bytes.min(lease.memory.held)
                });
                if tenant.manners == Manners::Honest {
                    tenant.come_down(lease.memory.held);
                    if lease.memory.max < lease.memory.held {
                        tenant.come_down(lease.memory.max);
                    }
                }
                tenant.may_use = tenant.may_use.min(lease.memory.max);
                tenant.term_ends = lease.expires_at.unwrap_or(Timestamp::NEVER);
                tenant.lease = Some(lease.clone());
            }
            // Its request for its lease is refused because the lease has ended.
            Answer::Denied {
                denial: Denial::UnknownLease { .. },
                ..
            } if tenant.lease.is_some() && !self.leaving.contains(&index) => {
                self.tenant_hears_end(index);
            }
            Answer::Denied { .. }
            | Answer::Done { .. }
            | Answer::Shed(_)
            | Answer::WouldGrant { .. } => {}
        }
    }

    pub(super) fn take_target(&mut self, id: LeaseId, nonce: u64, bytes: Bytes) {
        let Some(index) = self.tenants.iter().position(|tenant| tenant.is_lease(id)) else {
            self.tell_worker(id, bytes);
            return;
        };
        if self.faults.lost_streams.strikes(&mut self.rng, 0.3) {
            // The holder receives its target when its stream is restored, possibly too late.
            let wait = millis(&mut self.rng, 20, 4000);
            let answers = true;
            self.tenants[index].deaf_to = Some(id);
            self.after(
                wait,
                Happening::TenantObeys {
                    index,
                    lease: id,
                    nonce,
                    bytes,
                    answers,
                },
            );
            return;
        }
        let (wait, answers) = match self.tenants[index].manners {
            Manners::Honest | Manners::Misreporting | Manners::Greedy => {
                (millis(&mut self.rng, 1, 30), true)
            }
            Manners::Slow => {
                let wait = millis(&mut self.rng, 1, 30);
                let target = Target {
                    nonce,
                    bytes,
                    deadline: self.now,
                };
                let happening = Happening::TenantDefers {
                    index,
                    target,
                    lease: id,
                };
                self.after(wait, happening);
                (millis(&mut self.rng, 1000, 6000), true)
            }
            Manners::Silent => return,
        };
        let answers = answers && !(self.faults.lost_answers.strikes(&mut self.rng, 0.3));
        self.after(
            wait,
            Happening::TenantObeys {
                index,
                lease: id,
                nonce,
                bytes,
                answers,
            },
        );
    }

    /// Comes down according to its manners, and replies over its stream: late, in its own words, or for another target.
    pub(super) fn tenant_obeys(
        &mut self,
        index: usize,
        lease: LeaseId,
        nonce: u64,
        bytes: Bytes,
        answers: bool,
    ) -> Option<Event> {
        let strange = self.faults.strange_requests.strikes(&mut self.rng, 0.3);
        let draw = self.rng.random_range(0..6);
        let target = Target {
            nonce,
            bytes,
            deadline: self.now,
        };
        let tenant = &mut self.tenants[index];
        if !tenant.is_lease(lease) {
            return None;
        }
        tenant.deaf_to = None;
        if tenant.unheard_end {
            self.tenant_hears_end(index);
            return None;
        }
        let refuses = tenant.manners == Manners::Greedy && draw < 3;
        if tenant.manners != Manners::Misreporting && !refuses {
            tenant.come_down(bytes);
        }
        tenant.may_use = tenant.may_use.min(bytes);
        if !answers {
            return None;
        }
        let stream = tenant.stream_of(lease);
        stream.learn(Some(&target));
        let answer = if refuses {
            TargetAnswer::Refused {
                reason: "sim: will not".to_owned(),
            }
        } else {
            TargetAnswer::Applied
        };
        let (nonce, said) = match draw {
            0 | 1 if strange => (nonce.saturating_sub(1), bytes),
            2 | 3 if strange => (nonce + 1, bytes),
            4 if strange => (nonce, bytes + Bytes::new(1)),
            _ => (nonce, bytes),
        };
        let receipt = stream.receive(nonce, said, answer.clone());
        *self.verdicts.entry(receipt.verdict).or_default() += 1;
        let without_effect = matches!(receipt.verdict, Verdict::Stale | Verdict::Conflict);
        assert!(
            !without_effect || receipt.pass_on.is_none(),
            "{receipt:?} is passed on"
        );
        // Another stream of the same holder may not know better, and forwards its input.
        let passes = if strange && draw == 5 {
            Some(answer)
        } else {
            receipt.pass_on
        };
        passes.map(|answer| {
            Event::TargetAnswered(TargetAnswered {
                lease,
                nonce,
                answer,
                claimed: Some(bytes),
            })
        })
    }

    /// Reports at once that it needs longer.
    pub(super) fn tenant_defers(
        &mut self,
        index: usize,
        lease: LeaseId,
        target: &Target,
    ) -> Option<Event> {
        let tenant = &mut self.tenants[index];
        if !tenant.is_lease(lease) {
            return None;
        }
        let overage = tenant.used.saturating_sub(target.bytes);
        let stream = tenant.stream_of(lease);
        stream.learn(Some(target));
        let receipt = stream.receive(
            target.nonce,
            target.bytes,
            TargetAnswer::Deferred { overage },
        );
        *self.verdicts.entry(receipt.verdict).or_default() += 1;
        receipt.pass_on.map(|answer| {
            Event::TargetAnswered(TargetAnswered {
                lease,
                nonce: target.nonce,
                answer,
                claimed: None,
            })
        })
    }

    pub(super) fn take_end(&mut self, id: LeaseId) {
        let Some(index) = self.tenants.iter().position(|tenant| tenant.is_lease(id)) else {
            return;
        };
        if self.faults.late_renewals.strikes(&mut self.rng, 0.5)
            && let Some(lease) = self.tenants[index].lease.clone()
        {
            let peer = self.tenants[index].peer();
            let ticket = self.ticket();
            let wait = millis(&mut self.rng, 0, 100);
            let event = Event::LeaseRenewed(LeaseCall {
                ticket,
                lease: lease.id,
                generation: lease.generation,
                peer,
            });
            self.after(wait, Happening::Deliver(Box::new(event)));
        }
        if self.tenants[index].is_deaf() || self.faults.lost_streams.strikes(&mut self.rng, 0.3) {
            // It learns of it when its stream is restored, when a renewal is refused, or leaves when its term is over.
            self.tenants[index].unheard_end = true;
            if !self.tenants[index].is_deaf() {
                let wait = millis(&mut self.rng, 20, 4000);
                self.after(wait, Happening::TenantHearsEnd { index, lease: id });
            }
            return;
        }
        self.tenant_hears_end(index);
    }

    pub(super) fn tenant_hears_end(&mut self, index: usize) {
        let tenant = &mut self.tenants[index];
        tenant.unheard_end = false;
        match tenant.manners {
            Manners::Honest | Manners::Slow => {
                if self.leaving.insert(index) {
                    let wait = millis(&mut self.rng, 1, 500);
                    self.after(wait, Happening::TenantLeaves { index });
                }
            }
            // Keeps its memory until it dies.
            Manners::Misreporting | Manners::Silent | Manners::Greedy => {
                tenant.lease = None;
                tenant.may_use = Bytes::ZERO;
                if self.rng.random_bool(0.5) {
                    self.tenants[index].used = Bytes::ZERO;
                }
            }
        }
    }

    /// Releases its memory, with or without reporting it.
    pub(super) fn tenant_leaves(&mut self, index: usize) -> Option<Event> {
        if !self.leaving.remove(&index) {
            return None;
        }
        let says_so = self.rng.random_bool(0.5);
        let tenant = &mut self.tenants[index];
        tenant.used = Bytes::ZERO;
        tenant.may_use = Bytes::ZERO;
        let lease = tenant.lease.take().filter(|_| says_so)?;
        let peer = tenant.peer();
        Some(Event::LeaseReleased(LeaseCall {
            ticket: self.ticket(),
            lease: lease.id,
            generation: lease.generation,
            peer,
        }))
    }

    /// Its process ends, with all of its state.
    pub(super) fn kill_tenant(&mut self, index: usize) {
        let process = self.tenants[index].pid;
        for other in 0..self.tenants.len() {
            let same = process.is_some()
                && self.tenants[other].pid == process
                && self.tenants[other].alive;
            if other == index || same {
                self.end_tenant(other);
            }
        }
    }

    fn end_tenant(&mut self, index: usize) {
        let tenant = &mut self.tenants[index];
        let (lease, process) = (tenant.lease.take(), tenant.pid);
        tenant.die();
        tenant.asking.clear();
        self.leaving.remove(&index);
        let reported = self.calm || !self.rng.random_bool(0.1);
        if let Some(lease) = lease.filter(|_| reported) {
            let wait = millis(&mut self.rng, 1, 50);
            self.after(
                wait,
                Happening::Deliver(Box::new(Event::HolderLost {
                    lease: lease.id,
                    pid: process,
                })),
            );
        }
    }
}
