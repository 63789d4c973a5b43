//! What only some histories have. Drawn from sources of their own, so that the others stay what they were.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::tenant::{Manners, Tenant};

/// In every third history tenants are processes, of which two may have one name, and some of them are hasty.
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

/// In every third of those, processes have leases by two names. A non-compliant holder that has not come down by one name may not have
/// begun to use what it holds by the other: what it has is covered, and it cannot be distinguished from one that has come down.
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

/// In every fourth history the high water of workers is read, now and then, and not twice alike.
pub(super) fn choose_high_water(seed: u64) -> Option<ChaCha8Rng> {
    (seed % 4 == 3).then(|| ChaCha8Rng::seed_from_u64(seed ^ HIGH_WATER))
}

const HIGH_WATER: u64 = 0x0068_6967_6877;
