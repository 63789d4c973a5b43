//! Shared memory for requests, and shared connections; no client can use all of it.

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
use cotenant_units::Bytes;
use cotenant_units::lock::locked;

/// A client, as far as clients can be distinguished.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Who {
    /// By a Unix socket.
    #[default]
    Local,
    /// By its address; of IPv6 the part that names a network.
    Address(IpAddr),
    /// By its key.
    Key(Arc<str>),
}

impl Who {
    /// The client at the other end of a connection.
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

/// So many units for all clients, of which each may have a share.
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

/// Why there are no units.
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

    /// Takes units for a client, if there are as many for it.
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

    /// Has so many units from now on; unchanged where there are no more.
    fn resize(&mut self, units: usize) -> Result<(), Short> {
        match units.checked_sub(self.units()) {
            Some(0) => {}
            Some(more) => {
                let mut more = self.quota.take(&self.who, more)?;
                // The other permit is empty then.
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

/// Memory of one kind, for all clients together.
#[derive(Clone)]
pub(super) struct Pool {
    quota: Quota,
    max: Bytes,
    share: Bytes,
    /// As a refusal names it: "memory for …".
    what: &'static str,
}

impl Pool {
    /// So much memory, of which one client may have `share`.
    pub(super) fn new(max: Bytes, share: Bytes, what: &'static str) -> Self {
        Self {
            quota: Quota::new(kib_of(max), kib_of(share)),
            max,
            share,
            what,
        }
    }

    /// Sets memory aside, as long as the returned value lives.
    ///
    /// # Errors
    /// 429 when there is no room for it now.
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

    /// The refusal where there is no room.
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

/// Reserved memory. Memory freed with it is returned to the system.
pub(super) struct Held {
    share: Share,
    pool: Pool,
}

impl Held {
    /// Sets aside `bytes` in all, more or less than before.
    ///
    /// # Errors
    /// 429, and nothing has changed, when there is no room for more now.
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

/// Memory of one request, which its answer keeps to the last byte.
#[derive(Clone, Default)]
pub(super) struct RequestMemory {
    who: Who,
    held: Arc<Mutex<Option<Held>>>,
}

impl RequestMemory {
    /// An empty reservation for a request of this client.
    pub(super) fn of(who: Who) -> Self {
        Self {
            who,
            held: Arc::default(),
        }
    }

    /// The reservation under which the request's body was received.
    pub(super) fn in_extensions(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// An empty reservation for other data of the same client.
    pub(super) fn other(&self) -> Self {
        Self::of(self.who.clone())
    }

    /// Sets aside `bytes` in all.
    ///
    /// # Errors
    /// 429 when there is no room for it now.
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
