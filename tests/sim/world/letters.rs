//! Events that only some histories have.
//!
//! Drawn from separate sources, so that the others are unchanged.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::tenant::{Manners, Tenant};

/// In every third history tenants are processes, two of which may share a name, and some of them are hasty.
pub(super) fn choose_letters(seed: u64, tenants: &mut [Tenant]) -> Option<ChaCha8Rng> {
    if seed % 3 != 2 {
        return None;
    }
    let mut letters = ChaCha8Rng::seed_from_u64(seed ^ LETTERS);
    let mut last: Option<String> = None;
    for (tenant, pid) in tenants.iter_mut().zip(1u32..) {
        tenant.pid = Some(pid);
        tenant.hasty = letters.random_bool(0.5);
        if let Some(name) = last.take().filter(|_| letters.random_bool(0.4)) {
            tenant.name = name;
        } else {
            last = Some(tenant.name.clone());
        }
    }
    Some(letters)
}

const LETTERS: u64 = 0x6c65_7474_6572;

/// In every third of those, processes have leases under two names. A process that has not come down under one name may
/// not have started to use its lease under the other: its use is then covered, and it cannot be distinguished from a
/// compliant one.
pub(super) fn choose_names(seed: u64, tenants: &mut [Tenant]) {
    if seed % 9 != 5 {
        return;
    }
    let mut names = ChaCha8Rng::seed_from_u64(seed ^ NAMES);
    for index in 1..tenants.len() {
        let (before, after) = tenants.split_at_mut(index);
        let (Some(first), Some(second)) = (before.last_mut(), after.first_mut()) else {
            continue;
        };
        if first.name == second.name || !names.random_bool(0.6) {
            continue;
        }
        (second.pid, second.uid, second.measurable) = (first.pid, first.uid, first.measurable);
        for one in [first, second] {
            if one.manners == Manners::Misreporting {
                one.manners = Manners::Honest;
            }
        }
    }
}

const NAMES: u64 = 0x006e_616d_6573;

/// In every fourth history the peaks of workers are read at random times, with varying results.
pub(super) fn choose_high_water(seed: u64) -> Option<ChaCha8Rng> {
    (seed % 4 == 3).then(|| ChaCha8Rng::seed_from_u64(seed ^ HIGH_WATER))
}

const HIGH_WATER: u64 = 0x0068_6967_6877;
