//! Readiness socket of a worker (`NOTIFY_SOCKET`, sd_notify(3)).

use std::{
    fs::{self, Permissions},
    io::{self, IoSliceMut},
    os::{
        fd::AsRawFd as _,
        unix::{fs::PermissionsExt as _, net::UnixDatagram as StdDatagram},
    },
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use nix::{
    cmsg_space,
    sys::socket::{
        ControlMessageOwned, MsgFlags, UnixCredentials, recvmsg, setsockopt, sockopt::PassCred,
    },
};
use tokio::{io::Interest, net::UnixDatagram};

use cotenant_probe::processes::ProcessTable;

/// Receiver of notifications for one start.
#[derive(Debug)]
pub(super) struct Notifications {
    socket: UnixDatagram,
    path: PathBuf,
    proc: PathBuf,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Notification {
    pub(super) ready: bool,
    pub(super) status: Option<String>,
}

impl Notifications {
    /// Creates a socket in `folder`, removed on drop.
    ///
    /// It has a path, since not every library supports abstract names. Any user may write to it, because a worker may
    /// run as another user; the kernel identifies the sender.
    pub(super) fn open(folder: &Path, name: &str, proc: PathBuf) -> io::Result<Self> {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let path = folder.join(format!(
            "cotenant-notify-{}-{name}-{:x}.sock",
            std::process::id(),
            since.as_nanos()
        ));
        let socket = StdDatagram::bind(&path)?;
        let prepare = || {
            fs::set_permissions(&path, Permissions::from_mode(0o666))?;
            setsockopt(&socket, PassCred, &true)?;
            socket.set_nonblocking(true)
        };
        let prepared = prepare();
        let socket = prepared.and_then(|()| UnixDatagram::from_std(socket));
        match socket {
            Ok(socket) => Ok(Self { socket, path, proc }),
            Err(error) => {
                let _ = fs::remove_file(&path);
                Err(error)
            }
        }
    }

    /// Returns the value of `NOTIFY_SOCKET`.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next message from the process `leader`, its group or its descendants.
    pub(super) async fn next(&self, leader: u32) -> io::Result<Notification> {
        loop {
            let receive = || receive(self.socket.as_raw_fd());
            self.socket.readable().await?;
            let (text, sender) = match self.socket.try_io(Interest::READABLE, receive) {
                Ok(message) => message,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            };
            let sender = sender.and_then(|sender| u32::try_from(sender.pid()).ok());
            if sender.is_some_and(|pid| self.belongs(pid, leader)) {
                return Ok(parse(&text));
            }
            tracing::debug!(
                leader,
                ?sender,
                "a notification by an unmanaged process is ignored"
            );
        }
    }

    fn belongs(&self, pid: u32, leader: u32) -> bool {
        pid == leader
            || ProcessTable::read(&self.proc).is_ok_and(|table| table.family(leader).contains(&pid))
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Receives one datagram with its sender, as identified by the kernel.
fn receive(fd: std::os::fd::RawFd) -> io::Result<(String, Option<UnixCredentials>)> {
    let mut text = [0u8; MESSAGE_BYTES_MAX];
    let mut buffers = [IoSliceMut::new(&mut text)];
    let mut control = cmsg_space!(UnixCredentials);
    let message = recvmsg::<()>(
        fd,
        &mut buffers,
        Some(&mut control),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let sender = message.cmsgs()?.find_map(|part| match part {
        ControlMessageOwned::ScmCredentials(sender) => Some(sender),
        _ => None,
    });
    let length = message.bytes;
    let text = text.get(..length).unwrap_or_default();
    Ok((String::from_utf8_lossy(text).into_owned(), sender))
}

fn parse(text: &str) -> Notification {
    let mut sent = Notification::default();
    for line in text.lines() {
        match line.split_once('=') {
            Some(("READY", "1")) => sent.ready = true,
            Some(("STATUS", status)) => sent.status = Some(status.to_owned()),
            _ => {}
        }
    }
    sent
}

/// systemd's limit is also 4096 bytes.
const MESSAGE_BYTES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_several_lines_is_read() {
        let sent = parse("STATUS=loading 3 of 7\nMAINPID=9\nREADY=1");
        assert_eq!(
            sent,
            Notification {
                ready: true,
                status: Some("loading 3 of 7".to_owned())
            }
        );
        assert_eq!(parse("READY=0\nnonsense"), Notification::default());
    }

    #[tokio::test]
    async fn only_the_worker_itself_is_listened_to() {
        let own = std::process::id();
        let folder = tempfile::tempdir().unwrap();
        let notifications = Notifications::open(folder.path(), "own", "/proc".into()).unwrap();
        let sender = StdDatagram::unbound().unwrap();
        sender.send_to(b"READY=1", notifications.path()).unwrap();
        assert!(notifications.next(own).await.unwrap().ready);

        sender.send_to(b"READY=1", notifications.path()).unwrap();
        // Relative to a worker with another process id, this process is unmanaged.
        let process = notifications.next(u32::MAX);
        let waited = tokio::time::timeout(std::time::Duration::from_millis(50), process).await;
        assert!(waited.is_err());
        drop(notifications);
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            0,
            "nothing is left"
        );
    }
}
