//! Memory and connections shared by clients, with a bound for each client.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex},
};

use axum::http::Extensions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{access::Client, fault::Fault};
use cotenant_conversation::refusals::at_limit;
use cotenant_memory::heap;
use cotenant_units::{Bytes, lock::locked};

/// A client, as far as it can be identified.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Who {
    /// Connected by a Unix socket.
    #[default]
    Local,
    /// Its address; for IPv6 the network prefix.
    Address(IpAddr),
    Key(Arc<str>),
}

impl Who {
    /// The client at the remote end of a connection.
    pub(super) fn at(address: Option<IpAddr>) -> Self {
        match address.map(|address| address.to_canonical()) {
            None => Self::Local,
            Some(IpAddr::V6(address)) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                Self::Address(Ipv6Addr::from(network).into())
            }
            Some(address) => Self::Address(address),
        }
    }

    /// The same once its key is known.
    pub(super) fn with_key(self, client: Option<&Client>) -> Self {
        client.map_or(self, |client| Self::Key(Arc::clone(&client.name)))
    }
}

/// A number of units for all clients, with a maximum for each.
#[derive(Clone)]
pub(super) struct Quota {
    all: Arc<Semaphore>,
    share: usize,
    taken: Arc<Mutex<BTreeMap<Who, usize>>>,
}

/// Units of a client; returned on drop.
pub(super) struct Share {
    quota: Quota,
    who: Who,
    permit: OwnedSemaphorePermit,
}

/// The exhausted limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    OfAll,
    OfShare,
}

impl Quota {
    pub(super) fn new(all: usize, share: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(all)),
            share,
            taken: Arc::default(),
        }
    }

    /// Takes units for a client, if available.
    pub(super) fn take(&self, who: &Who, units: usize) -> Result<Share, Short> {
        let mut taken = locked(&self.taken);
        let has = taken
            .get(who)
            .copied()
            .unwrap_or_default()
            .saturating_add(units);
        if has > self.share {
            return Err(Short::OfShare);
        }
        let permits = u32::try_from(units).map_err(|_beyond_any| Short::OfAll)?;
        let permit = Arc::clone(&self.all)
            .try_acquire_many_owned(permits)
            .map_err(|_full| Short::OfAll)?;
        taken.insert(who.clone(), has);
        Ok(Share {
            quota: self.clone(),
            who: who.clone(),
            permit,
        })
    }
}

impl Share {
    fn units(&self) -> usize {
        self.permit.num_permits()
    }

    /// Changes the number of units; unchanged if there are not enough.
    fn resize(&mut self, units: usize) -> Result<(), Short> {
        match units.checked_sub(self.units()) {
            Some(0) => {}
            Some(more) => {
                let mut more = self.quota.take(&self.who, more)?;
                // The other permit is then empty.
                if let Some(permit) = more.permit.split(more.units()) {
                    self.permit.merge(permit);
                }
            }
            None => {
                let less = self.units() - units;
                drop(self.permit.split(less));
                self.quota.give_back(&self.who, less);
            }
        }
        Ok(())
    }
}

impl Quota {
    fn give_back(&self, who: &Who, units: usize) {
        let mut taken = locked(&self.taken);
        if let Some(has) = taken.get_mut(who) {
            *has = has.saturating_sub(units);
            if *has == 0 {
                taken.remove(who);
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.quota.give_back(&self.who, self.units());
    }
}

/// Memory of one kind for all clients.
#[derive(Clone)]
pub(super) struct Pool {
    quota: Quota,
    max: Bytes,
    share: Bytes,
    /// Completes "memory for …" in a refusal.
    what: &'static str,
}

impl Pool {
    /// A pool of `max` bytes, of which one client may have `share`.
    pub(super) fn new(max: Bytes, share: Bytes, what: &'static str) -> Self {
        Self {
            quota: Quota::new(kib_of(max), kib_of(share)),
            max,
            share,
            what,
        }
    }

    /// Reserves memory until the returned value is dropped; 429 if none is free now.
    pub(super) fn hold(&self, act: &str, who: &Who, bytes: Bytes) -> Result<Held, Fault> {
        let share = self
            .quota
            .take(who, kib_of(bytes))
            .map_err(|short| self.short(act, short))?;
        Ok(Held {
            share,
            pool: self.clone(),
        })
    }

    /// The refusal of an exhausted pool.
    pub(super) fn full(&self, act: &str) -> Fault {
        self.short(act, Short::OfAll)
    }

    fn short(&self, act: &str, short: Short) -> Fault {
        let (whose, limit) = match short {
            Short::OfAll => ("", self.max),
            Short::OfShare => (" of one client", self.share),
        };
        let what = format!("memory for {}{whose}, in bytes,", self.what);
        at_limit(act, what, limit.get()).into()
    }
}

/// Reserved memory. When it is dropped, free heap memory is returned to the system.
pub(super) struct Held {
    share: Share,
    pool: Pool,
}

impl Held {
    /// Changes the reservation to `bytes` in total; unchanged with a 429 if no more is free now.
    pub(super) fn resize(&mut self, act: &str, bytes: Bytes) -> Result<(), Fault> {
        let before = self.share.units();
        let wanted = kib_of(bytes);
        self.share
            .resize(wanted)
            .map_err(|short| self.pool.short(act, short))?;
        heap::freed(kib(before.saturating_sub(wanted)));
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        heap::freed(kib(self.share.units()));
    }
}

/// Memory of one request, held until the last byte of its answer.
#[derive(Clone, Default)]
pub(super) struct RequestMemory {
    who: Who,
    held: Arc<Mutex<Option<Held>>>,
}

impl RequestMemory {
    /// An empty reservation for this client.
    pub(super) fn of(who: Who) -> Self {
        Self {
            who,
            held: Arc::default(),
        }
    }

    /// The reservation under which the body of the request was received.
    pub(super) fn in_extensions(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// An empty reservation for other data of the same client.
    pub(super) fn other(&self) -> Self {
        Self::of(self.who.clone())
    }

    /// Reserves `bytes` in total; 429 if none is free now.
    pub(super) fn hold(&self, pool: &Pool, act: &str, bytes: Bytes) -> Result<(), Fault> {
        let mut held = locked(&self.held);
        match &mut *held {
            Some(held) => held.resize(act, bytes),
            none => {
                *none = Some(pool.hold(act, &self.who, bytes)?);
                Ok(())
            }
        }
    }

    /// Reserves `bytes` more; 429 if none is free now.
    pub(super) fn hold_more(&self, pool: &Pool, act: &str, bytes: Bytes) -> Result<(), Fault> {
        let before = locked(&self.held).as_ref().map(|held| held.share.units());
        self.hold(
            pool,
            act,
            bytes.saturating_add(kib(before.unwrap_or_default())),
        )
    }
}

fn kib_of(bytes: Bytes) -> usize {
    Bytes::new(bytes.get().div_ceil(1 << 10)).as_len()
}

fn kib(units: usize) -> Bytes {
    Bytes::from_kib(u64::try_from(units).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Who {
        Who::at(Some(text.parse().unwrap()))
    }

    #[test]
    fn one_client_leaves_the_others_their_part_and_gives_all_back() {
        let quota = Quota::new(10, 6);
        let (first, second) = (address("192.168.1.7"), address("192.168.1.8"));
        let mut held = quota.take(&first, 4).unwrap();
        assert_eq!(quota.take(&first, 3).err(), Some(Short::OfShare));
        held.resize(6).unwrap();
        assert_eq!(held.resize(7), Err(Short::OfShare));
        let other = quota.take(&second, 4).unwrap();
        assert_eq!(quota.take(&second, 1).err(), Some(Short::OfAll));
        held.resize(1).unwrap();
        drop(quota.take(&second, 2).unwrap());
        drop((held, other));
        assert!(quota.taken.lock().unwrap().is_empty());
        assert_eq!(quota.all.available_permits(), 10);
    }

    #[test]
    fn a_client_is_its_key_or_its_address_or_its_network() {
        assert_eq!(address("::ffff:192.168.1.7"), address("192.168.1.7"));
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(Who::at(None), Who::Local);
    }
}
