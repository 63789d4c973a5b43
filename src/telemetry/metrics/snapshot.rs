//! Figures of a snapshot as metrics.

use std::{collections::BTreeSet, time::Duration};

use prometheus_client::metrics::gauge::Atomic as _;

use cotenant_policy::{
    health::safe_profile,
    lease::{LeaseKind, LeaseState},
    pressure::{GpuUse, PressureLevel},
    reboot::RebootReason,
    snapshot::{EngineState, Snapshot, WorkerState},
};
use cotenant_units::{Bytes, lock::locked};

use super::Metrics;
use crate::table::{Known, Size, labels, raise};

impl Metrics {
    /// Sets all figures of a snapshot.
    pub fn observe(&self, snapshot: &Snapshot) {
        let _whole = locked(&self.whole);
        set(&self.budget, snapshot.memory.budget);
        set(&self.budget_free, snapshot.memory.free);
        set(&self.budget_held, snapshot.memory.held);
        set(&self.budget_unaccounted, snapshot.memory.unaccounted);
        set(&self.budget_used, snapshot.memory.used);
        set_known(&self.headroom, snapshot.pressure.headroom);
        self.safe_profile
            .set(u64::from(safe_profile(snapshot).is_some()));
        for reason in RebootReason::WORDS {
            let advised = snapshot.reboot.iter().any(|known| known.word() == reason);
            self.reboot_advised
                .get_or_create(&labels([("reason", reason)]))
                .set(advised.into());
        }
        self.pressure_level.set(match snapshot.pressure.level {
            PressureLevel::Normal => 0,
            PressureLevel::Elevated => 1,
            PressureLevel::Critical => 2,
        });
        self.observe_sample(snapshot);
        self.observe_leases(snapshot);
        self.observe_engine(snapshot);
        self.observe_workers(snapshot);
    }

    fn observe_sample(&self, snapshot: &Snapshot) {
        let Some(sample) = &snapshot.pressure.sample else {
            return;
        };
        set_known(&self.supervisor, sample.own_used);
        set_known(&self.memory_available, Some(sample.memory.mem_available));
        set_known(&self.cma_free, sample.gpu.cma_free);
        set_known(&self.gpu_used, sample.gpu.gpu_used.map(GpuUse::bytes));
        set_known(&self.page_pool, sample.gpu.nvmap_pool);
        set_known(&self.zram_store, sample.zram_store);
        if let Some(kills) = sample.counters.oom_kills {
            raise(&self.oom_kills, kills);
        }
        if let Some(hundredths) = sample.stalls.psi_some_avg10 {
            self.pressure_some
                .get_or_create(&labels([("window", "10s")]))
                .set(f64::from(hundredths) / 10_000.0);
        }
        for (kind, total_us) in [
            ("some", sample.stalls.psi_some_total_us),
            ("full", sample.stalls.psi_full_total_us),
        ] {
            if let Some(total_us) = total_us {
                let seconds = Duration::from_micros(total_us).as_secs_f64();
                self.pressure_stall
                    .get_or_create(&labels([("kind", kind)]))
                    .inner()
                    .set(seconds);
            }
        }
    }

    fn observe_leases(&self, snapshot: &Snapshot) {
        for state in ["requested", "granted", "revoking"] {
            self.leases
                .get_or_create(&labels([("state", state)]))
                .set(0);
        }
        // Removes ended leases; scrapes wait meanwhile.
        self.lease_held.clear();
        self.lease_used.clear();
        self.lease_target.clear();
        let mut read = BTreeSet::new();
        for lease in &snapshot.leases {
            let state = match lease.state {
                LeaseState::Requested => "requested",
                LeaseState::Granted => "granted",
                LeaseState::Revoking => "revoking",
                LeaseState::Gone => continue,
            };
            self.leases.get_or_create(&labels([("state", state)])).inc();
            let tenant = labels([("tenant", &lease.tenant)]);
            let kind = match lease.kind {
                LeaseKind::Engine => "engine",
                LeaseKind::Tenant => "tenant",
                LeaseKind::Worker => "worker",
            };
            let holder = labels([("tenant", &lease.tenant), ("kind", kind)]);
            // A tenant may have several leases.
            self.lease_held
                .get_or_create(&holder)
                .inc_by(lease.memory.held.get());
            // One reading of the process, however many leases it has.
            if let Some(used) = lease.memory.used
                && read.insert(lease.holder())
            {
                self.lease_used.get_or_create(&tenant).inc_by(used.get());
            }
            if let Some(target) = &lease.target {
                self.lease_target
                    .get_or_create(&tenant)
                    .inc_by(target.bytes.get());
            }
        }
    }

    fn observe_engine(&self, snapshot: &Snapshot) {
        raise(&self.regrow_bytes, snapshot.totals.regrown_bytes.get());
        self.llm.observe(&snapshot.engine);
        let (mut resident, mut streamed) = (0, 0);
        let (mut weights, mut capacity) = (Bytes::ZERO, Bytes::ZERO);
        let chunk = snapshot
            .engine
            .in_force
            .as_ref()
            .map_or(0, |plan| plan.prefill_chunk.get());
        self.prefill_chunk.set(chunk.into());
        if let (Some(shape), Some(plan)) = (&snapshot.engine.shape, &snapshot.engine.in_force) {
            for (layer, index) in shape.layers.iter().zip(0u32..) {
                if plan.resident.contains(&index) {
                    weights = weights.saturating_add(layer.resident_bytes);
                }
            }
            resident = shape.resident_layers(plan).into();
            streamed = u64::from(shape.layer_count()) - resident;
            weights = weights.saturating_add(shape.fixed_bytes);
            capacity = shape.kv.capacity_bytes(plan.kv_capacity, plan.kv_type);
        }
        if snapshot.engine.state != EngineState::Absent {
            let permanent = snapshot
                .engine
                .failure
                .as_ref()
                .is_some_and(|failure| failure.permanent().is_some());
            let now = match snapshot.engine.state {
                EngineState::Failed if permanent => "failed",
                EngineState::Failed => "retrying",
                EngineState::Ready => "ready",
                EngineState::Absent | EngineState::Loading => "loading",
            };
            for state in ["loading", "ready", "retrying", "failed"] {
                self.llm_state
                    .get_or_create(&labels([("state", state)]))
                    .set((state == now).into());
            }
        }
        // Without layers there is no ratio.
        if resident + streamed > 0 {
            self.layers
                .get_or_create(&labels([("state", "resident")]))
                .set(resident);
            self.layers
                .get_or_create(&labels([("state", "streamed")]))
                .set(streamed);
        } else {
            self.layers.clear();
        }
        set(&self.weights_resident, weights);
        set(&self.kv_capacity, capacity);
    }

    fn observe_workers(&self, snapshot: &Snapshot) {
        for worker in &snapshot.workers {
            for (state, name) in WORKER_STATES {
                let series = labels([("worker", &worker.name), ("state", name)]);
                self.worker_state
                    .get_or_create(&series)
                    .set((state == worker.state).into());
            }
        }
    }
}

/// Worker states with their names in metrics.
const WORKER_STATES: [(WorkerState, &str); 7] = [
    (WorkerState::Stopped, "stopped"),
    (WorkerState::AwaitingMemory, "awaiting_memory"),
    (WorkerState::BackingOff, "backing_off"),
    (WorkerState::Starting, "starting"),
    (WorkerState::Ready, "ready"),
    (WorkerState::Stopping, "stopping"),
    (WorkerState::Degraded, "degraded"),
];

fn set_known(gauge: &Known, bytes: Option<Bytes>) {
    match bytes {
        Some(bytes) => set(&gauge.get_or_create(&[]), bytes),
        None => {
            gauge.remove(&[]);
        }
    }
}

fn set(gauge: &Size, bytes: Bytes) {
    gauge.set(bytes.get());
}
