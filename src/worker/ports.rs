//! TCP ports of workers.

use std::{
    collections::BTreeSet,
    fmt, io,
    net::{Ipv4Addr, TcpListener},
    sync::Mutex,
};

use cotenant_units::lock::locked;

/// Port reserved among the workers of this program until dropped.
#[derive(Debug)]
pub(super) struct Claimed {
    port: u16,
}

impl Claimed {
    /// Claims a port on which no process listens and that no other worker has.
    pub(super) fn free() -> io::Result<Self> {
        for _ in 0..ATTEMPTS_MAX {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
                .local_addr()?
                .port();
            if claim(port) {
                return Ok(Self { port });
            }
        }
        Err(io::Error::other(format!(
            "the kernel offered only ports of other workers, {ATTEMPTS_MAX} times"
        )))
    }

    /// Claims this port; `None` if another worker has it.
    pub(super) fn fixed(port: u16) -> Option<Self> {
        claim(port).then_some(Self { port })
    }

    pub(super) const fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        locked(&CLAIMED).remove(&self.port);
    }
}

/// Returns the process that listens on a loopback port, if any.
pub(super) fn listener(port: u16) -> Option<String> {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
        _ => return None,
    }
    let owner = owner_of(port).map(|owner| owner.to_string());
    Some(owner.unwrap_or_else(|| "a program that cannot be seen from here".to_owned()))
}

/// Process that listens on a port; shown as `name` (pid 12).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortOwner {
    /// Its name.
    pub name: String,
    /// Its id.
    pub pid: i32,
}

impl fmt::Display for PortOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (pid {})", self.name, self.pid)
    }
}

/// Returns the process that listens on a port, if visible.
pub fn owner_of(port: u16) -> Option<PortOwner> {
    let sockets = procfs::net::tcp().unwrap_or_default();
    let sockets = sockets
        .into_iter()
        .chain(procfs::net::tcp6().unwrap_or_default());
    let inodes: BTreeSet<u64> = sockets
        .filter(|entry| {
            entry.state == procfs::net::TcpState::Listen && entry.local_address.port() == port
        })
        .map(|entry| entry.inode)
        .collect();
    let has_it = |process: &procfs::process::Process| {
        process.fd().is_ok_and(|descriptors| {
            descriptors
                .flatten()
                .any(|fd| matches!(fd.target, procfs::process::FDTarget::Socket(inode) if inodes.contains(&inode)))
        })
    };
    let owner = procfs::process::all_processes()
        .ok()?
        .flatten()
        .find(has_it)?;
    let name = owner.stat().ok()?.comm;
    Some(PortOwner {
        name,
        pid: owner.pid(),
    })
}

fn claim(port: u16) -> bool {
    locked(&CLAIMED).insert(port)
}

static CLAIMED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// Far more than the number of workers.
const ATTEMPTS_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_workers_never_get_one_port() {
        let claims: Vec<Claimed> = (0..64).map(|_| Claimed::free().unwrap()).collect();
        let ports: BTreeSet<u16> = claims.iter().map(Claimed::port).collect();
        assert_eq!(ports.len(), claims.len());
        let first = claims[0].port();
        assert!(Claimed::fixed(first).is_none());
        drop(claims);
        assert!(
            Claimed::fixed(first).is_some(),
            "given back when the worker is gone"
        );
    }

    #[test]
    fn who_listens_is_named() {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let who = listener(port).unwrap();
        assert!(
            who.contains(&format!("(pid {})", std::process::id())),
            "{who}"
        );
        drop(socket);
        assert!(listener(port).is_none());
    }
}
