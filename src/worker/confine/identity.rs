//! User, group and resource limits of a worker.

use std::{collections::BTreeMap, ffi::CString, fs, io};

use nix::{
    errno::Errno,
    sys::resource::{self, getrlimit, rlim_t, setrlimit},
    unistd::{Gid, Group, Uid, User, getgrouplist, setgroups, setresgid, setresuid},
};

use super::settings::{ConfineError, Measure};
use cotenant_config::{Confinement, Resource};

/// User and groups to switch to.
#[derive(Debug)]
pub(super) struct Ids {
    uid: Uid,
    gid: Gid,
    others: Vec<Gid>,
    words: String,
}

/// Returns the user and groups of a worker if they differ from ours.
pub(super) fn ids(confinement: &Confinement) -> Result<Option<Ids>, ConfineError> {
    if confinement.user.is_none() && confinement.group.is_none() {
        return Ok(None);
    }
    let user = confinement.user.as_deref().map(user_of).transpose()?;
    let group = confinement.group.as_deref().map(group_of).transpose()?;
    let uid = user
        .as_ref()
        .map_or_else(nix::unistd::geteuid, |user| user.0);
    let gid = group
        .or_else(|| user.as_ref().and_then(|user| user.1))
        .unwrap_or_else(nix::unistd::getegid);
    let named = user
        .as_ref()
        .and_then(|user| CString::new(user.2.as_str()).ok());
    let others = named
        .and_then(|name| getgrouplist(&name, gid).ok())
        .unwrap_or_default();
    let name = confinement
        .user
        .clone()
        .or_else(|| confinement.group.clone());
    let name = name.unwrap_or_default();
    if uid == nix::unistd::geteuid() && gid == nix::unistd::getegid() {
        return Ok(None);
    }
    for (capability, bit) in [("CAP_SETUID", CAP_SETUID), ("CAP_SETGID", CAP_SETGID)] {
        let needed = bit == CAP_SETGID || uid != nix::unistd::geteuid();
        if needed && !has_capability(bit) {
            let own = nix::unistd::geteuid().as_raw();
            return Err(ConfineError::Identity {
                name,
                own,
                capability,
            });
        }
    }
    Ok(Some(Ids {
        uid,
        gid,
        others,
        words: format!("uid {uid}, gid {gid}"),
    }))
}

impl Ids {
    pub(super) fn measure(&self) -> Measure {
        Measure {
            what: "user",
            state: Ok(self.words.clone()),
            asked: true,
        }
    }

    /// Switches permanently. Runs between fork and exec: system calls only.
    pub(super) fn become_them(&self) -> io::Result<()> {
        // Real, effective and saved ids are set alike, so the switch is irreversible. The C library's functions would
        // switch all threads; the new process has only this one.
        setgroups(&self.others)?;
        setresgid(self.gid, self.gid, self.gid)?;
        Ok(setresuid(self.uid, self.uid, self.uid)?)
    }
}

/// Drops ambient capabilities, which a unit may give the supervisor (`AmbientCapabilities=`): they survive `exec`, and
/// a change between two users other than root (capabilities(7)). Runs between fork and exec: system calls only.
pub(super) fn drop_ambient() -> io::Result<()> {
    let clear = libc::PR_CAP_AMBIENT_CLEAR_ALL;
    // SAFETY: passes four numbers, of which the last three are ignored.
    match Errno::result(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, clear, 0, 0, 0) }) {
        // Not supported before Linux 4.3.
        Ok(_) | Err(Errno::EINVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Uid, its own group, and its name if known.
type Known = (Uid, Option<Gid>, String);

fn user_of(name: &str) -> Result<Known, ConfineError> {
    let unknown = || ConfineError::Unknown {
        kind: "user",
        name: name.to_owned(),
    };
    let found = match name.parse::<u32>() {
        Ok(number) => {
            let uid = Uid::from_raw(number);
            let user = User::from_uid(uid).ok().flatten();
            return Ok(user.map_or((uid, None, String::new()), |user| {
                (uid, Some(user.gid), user.name)
            }));
        }
        Err(_) => User::from_name(name).ok().flatten(),
    };
    let user = found.ok_or_else(unknown)?;
    Ok((user.uid, Some(user.gid), user.name))
}

fn group_of(name: &str) -> Result<Gid, ConfineError> {
    if let Ok(number) = name.parse::<u32>() {
        return Ok(Gid::from_raw(number));
    }
    let found = Group::from_name(name).ok().flatten();
    found
        .map(|group| group.gid)
        .ok_or_else(|| ConfineError::Unknown {
            kind: "group",
            name: name.to_owned(),
        })
}

/// Converts limits to the kernel's form.
///
/// # Errors
/// If one exceeds the supervisor's own hard limit, which it may not raise.
pub(super) fn limits(
    resources: &BTreeMap<Resource, Option<u64>>,
) -> Result<Vec<(Resource, rlim_t)>, ConfineError> {
    resources
        .iter()
        .map(|(resource, limit)| {
            let wanted = limit.unwrap_or(libc::RLIM_INFINITY);
            let hard = hard_limit(*resource).map_err(|source| ConfineError::System {
                what: "resource limits",
                source,
            })?;
            if wanted > hard && !has_capability(CAP_SYS_RESOURCE) {
                return Err(ConfineError::Resource {
                    resource: resource.name(),
                    wanted: limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string()),
                    hard,
                });
            }
            Ok((*resource, wanted))
        })
        .collect()
}

/// Sets soft and hard limit of the calling process by one system call.
pub(super) fn set_limit(resource: Resource, limit: rlim_t) -> io::Result<()> {
    Ok(setrlimit(number_of(resource), limit, limit)?)
}

fn hard_limit(resource: Resource) -> io::Result<rlim_t> {
    Ok(getrlimit(number_of(resource))?.1)
}

const fn number_of(resource: Resource) -> resource::Resource {
    match resource {
        Resource::AddressSpace => resource::Resource::RLIMIT_AS,
        Resource::Core => resource::Resource::RLIMIT_CORE,
        Resource::FileSize => resource::Resource::RLIMIT_FSIZE,
        Resource::LockedMemory => resource::Resource::RLIMIT_MEMLOCK,
        Resource::OpenFiles => resource::Resource::RLIMIT_NOFILE,
        Resource::Processes => resource::Resource::RLIMIT_NPROC,
    }
}

fn has_capability(bit: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << bit) != 0)
}

/// From linux/capability.h.
const CAP_SETGID: u32 = 6;
/// From linux/capability.h.
const CAP_SETUID: u32 = 7;
/// From linux/capability.h.
const CAP_SYS_RESOURCE: u32 = 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_exist_is_named() {
        let confinement = Confinement {
            user: Some("no-such-user".to_owned()),
            ..Confinement::default()
        };
        assert_eq!(
            ids(&confinement).unwrap_err().to_string(),
            "user `no-such-user` does not exist"
        );
        let confinement = Confinement {
            group: Some("no-such-group".to_owned()),
            ..Confinement::default()
        };
        assert_eq!(
            ids(&confinement).unwrap_err().to_string(),
            "group `no-such-group` does not exist"
        );
    }

    #[test]
    fn another_user_needs_the_right_and_says_which() {
        let confinement = Confinement {
            user: Some((nix::unistd::geteuid().as_raw() + 4321).to_string()),
            ..Confinement::default()
        };
        match ids(&confinement) {
            Ok(ids) => assert!(ids.is_some() && has_capability(CAP_SETUID)),
            Err(error) => {
                assert!(!has_capability(CAP_SETUID) || !has_capability(CAP_SETGID));
                assert!(error.to_string().contains("lacks `CAP_SET"), "{error}");
            }
        }
        let own = Confinement {
            user: Some(nix::unistd::geteuid().as_raw().to_string()),
            group: Some(nix::unistd::getegid().as_raw().to_string()),
            ..Confinement::default()
        };
        assert!(ids(&own).unwrap().is_none(), "nothing to become");
    }
}
