//! Listening sockets passed by systemd (`sd_listen_fds(3)`), which outlive the daemon.
//!
//! `FileDescriptorName=` of the socket unit names the API: `grpc`, `http` or `wyoming`. A socket with a configured
//! address replaces the daemon's own; one with another address is served too, with a warning.

use std::{
    fmt,
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
        linux::net::SocketAddrExt as _,
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
};

use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike as _, SockaddrStorage, getsockname, getsockopt, sockopt,
};

use cotenant_config::{Config, WyomingListen};

/// Sockets passed at the start.
#[derive(Debug, Default)]
pub struct PassedSockets {
    sockets: Vec<PassedSocket>,
    faults: Vec<String>,
}

/// Listening socket that systemd holds as well.
#[derive(Debug)]
pub(super) struct PassedSocket {
    name: String,
    pub(super) address: Address,
    pub(super) listener: PassedListener,
}

#[derive(Debug)]
pub(super) enum PassedListener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Path(PathBuf),
    Abstract(String),
}

#[derive(Debug, PartialEq, Eq)]
enum Use {
    /// It is served in place of our own.
    Agreed,
    /// It is served, but the configuration does not contain its address under this key.
    Other(&'static str),
    /// It is not served, for this reason.
    None(&'static str),
}

impl PassedSockets {
    /// Takes ownership of the sockets.
    ///
    /// # Safety
    /// Must be called before this process opens descriptors, because it takes ownership of those named in the
    /// environment.
    pub unsafe fn take() -> Self {
        let mut passed = Self::default();
        match sd_notify::listen_fds_with_names() {
            Ok(descriptors) => {
                for (descriptor, name) in descriptors {
                    // SAFETY: it is open, since setting its flag succeeded; by the caller's promise it has no other
                    // owner.
                    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
                    match PassedListener::of(descriptor) {
                        Ok((address, listener)) => passed.sockets.push(PassedSocket {
                            name,
                            address,
                            listener,
                        }),
                        Err(why) => passed
                            .faults
                            .push(format!("systemd's socket `{name}` is not served: {why}")),
                    }
                }
            }
            Err(error) => passed
                .faults
                .push(format!("no socket from systemd is served: {error}")),
        }
        passed
    }

    /// Logs every socket that disagrees with the configuration.
    pub(super) fn report(&self, config: &Config) {
        for fault in &self.faults {
            tracing::warn!("{fault}");
        }
        for PassedSocket { name, address, .. } in &self.sockets {
            match purpose(name, address, config) {
                Use::Agreed => {}
                Use::Other(key) => {
                    tracing::warn!(
                        "systemd's socket `{name}` listens on {address}, which `{key}` does not name: served as well"
                    );
                }
                Use::None(why) => {
                    tracing::warn!("systemd's socket `{name}` on {address} is not served: {why}");
                }
            }
        }
    }

    /// Returns sockets with unconfigured addresses that other machines reach without a key, each with its setting.
    pub(super) fn open_listeners(&self, config: &Config) -> Vec<(&'static str, SocketAddr)> {
        let open = self.sockets.iter().filter_map(|socket| {
            match (
                purpose(&socket.name, &socket.address, config),
                &socket.address,
            ) {
                (Use::Other(key), Address::Tcp(address)) => Some((key, *address)),
                _ => None,
            }
        });
        open.filter(|(key, address)| {
            !address.ip().to_canonical().is_loopback()
                && (*key != "http.listen" || config.http.keys_file.is_none())
        })
        .collect()
    }

    /// Returns the sockets served for an API.
    pub(super) fn of<'a>(
        &'a self,
        api: &'a str,
        config: &'a Config,
    ) -> impl Iterator<Item = &'a PassedSocket> {
        self.sockets.iter().filter(move |socket| {
            socket.name == api && !matches!(purpose(api, &socket.address, config), Use::None(_))
        })
    }

    /// Returns whether a socket was passed for a configured address of an API.
    pub(super) fn hold(&self, api: &str, configured: &Address) -> bool {
        self.sockets
            .iter()
            .any(|socket| socket.name == api && configured.takes(&socket.address))
    }
}

impl PassedListener {
    fn of(descriptor: OwnedFd) -> Result<(Address, Self), String> {
        let system = |error: nix::Error| error.to_string();
        let fd = descriptor.as_fd();
        if getsockopt(&fd, sockopt::SockType).map_err(system)? != SockType::Stream
            || !getsockopt(&fd, sockopt::AcceptConn).map_err(system)?
        {
            return Err(
                "it does not accept connections; it needs `ListenStream=` and `Accept=no`"
                    .to_owned(),
            );
        }
        let family = getsockname::<SockaddrStorage>(fd.as_raw_fd())
            .map_err(system)?
            .family();
        match family {
            Some(AddressFamily::Inet | AddressFamily::Inet6) => {
                let listener = TcpListener::from(descriptor);
                let address = listener.local_addr().map_err(|error| error.to_string())?;
                Ok((Address::Tcp(address), Self::Tcp(listener)))
            }
            Some(AddressFamily::Unix) => {
                let listener = UnixListener::from(descriptor);
                let address = listener.local_addr().map_err(|error| error.to_string())?;
                let name = address
                    .as_abstract_name()
                    .map(|name| String::from_utf8_lossy(name).into_owned());
                let path = address.as_pathname().map(Path::to_owned);
                let address = path.map(Address::Path).or(name.map(Address::Abstract));
                Ok((address.ok_or("it has no address")?, Self::Unix(listener)))
            }
            _ => Err("it is neither TCP nor a Unix socket".to_owned()),
        }
    }
}

impl Address {
    /// Returns whether a socket bound to `other` serves this configured address; port 0 matches any.
    fn takes(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Tcp(wanted), Self::Tcp(other)) => {
                wanted.ip() == other.ip() && (wanted.port() == 0 || wanted.port() == other.port())
            }
            (Self::Path(wanted), Self::Path(other)) => {
                wanted == other || std::path::absolute(wanted).is_ok_and(|wanted| wanted == *other)
            }
            _ => self == other,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Abstract(name) => write!(f, "@{name}"),
        }
    }
}

pub(super) const GRPC: &str = "grpc";
pub(super) const HTTP: &str = "http";
pub(super) const WYOMING: &str = "wyoming";

/// Determines the use of a socket from its name, its address and the configuration.
fn purpose(name: &str, address: &Address, config: &Config) -> Use {
    let (key, configured) = match (name, address) {
        (GRPC, Address::Tcp(_)) => {
            let wanted = config.grpc.tcp.as_ref().map(|tcp| Address::Tcp(tcp.listen));
            return match wanted {
                Some(wanted) if wanted.takes(address) => Use::Agreed,
                _ => Use::None("`grpc.tcp`, which has the certificates, does not name it"),
            };
        }
        (GRPC, _) => {
            let path = config.grpc.socket.clone().map(Address::Path);
            (
                "grpc.socket",
                path.into_iter()
                    .chain(config.grpc.abstract_name.clone().map(Address::Abstract))
                    .collect(),
            )
        }
        (HTTP, Address::Tcp(_)) => (
            "http.listen",
            config.http.listen.map(Address::Tcp).into_iter().collect(),
        ),
        (HTTP, _) => return Use::None("HTTP is served by TCP only"),
        (WYOMING, _) => (
            "wyoming.listen",
            config
                .wyoming
                .listen
                .iter()
                .map(Address::from)
                .collect::<Vec<_>>(),
        ),
        _ => {
            return Use::None(
                "no API has this name; set `FileDescriptorName=` to grpc, http or wyoming",
            );
        }
    };
    if configured.iter().any(|wanted| wanted.takes(address)) {
        Use::Agreed
    } else {
        Use::Other(key)
    }
}

impl From<&WyomingListen> for Address {
    fn from(listen: &WyomingListen) -> Self {
        match listen {
            WyomingListen::Tcp(address) => Self::Tcp(*address),
            WyomingListen::Unix(path) => Self::Path(path.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(text: &str) -> Address {
        Address::Tcp(text.parse().unwrap())
    }

    #[test]
    fn a_passed_socket_is_used_by_its_name_and_its_address() {
        let config = Config::parse(
            "http: {listen: 127.0.0.1:8410}\n\
             wyoming: {listen: ['tcp://127.0.0.1:10300']}\n\
             grpc: {socket: /run/cotenant/cotenant.sock, abstract_name: cotenant}\n",
        )
        .unwrap();
        let path = Address::Path("/run/cotenant/cotenant.sock".into());
        for (name, address, expected) in [
            ("http", tcp("127.0.0.1:8410"), Use::Agreed),
            ("http", tcp("0.0.0.0:8410"), Use::Other("http.listen")),
            ("grpc", path.clone(), Use::Agreed),
            (
                "grpc",
                Address::Abstract("cotenant".to_owned()),
                Use::Agreed,
            ),
            (
                "grpc",
                Address::Abstract("another".to_owned()),
                Use::Other("grpc.socket"),
            ),
            ("wyoming", tcp("127.0.0.1:10300"), Use::Agreed),
            ("wyoming", path.clone(), Use::Other("wyoming.listen")),
        ] {
            assert_eq!(
                purpose(name, &address, &config),
                expected,
                "{name} {address}"
            );
        }
        // No certificates, unsupported transport, unknown API.
        for (name, address) in [
            ("grpc", tcp("127.0.0.1:8411")),
            ("http", path),
            ("cotenant.socket", tcp("[::1]:1")),
        ] {
            assert!(
                matches!(purpose(name, &address, &config), Use::None(_)),
                "{name} {address}"
            );
        }
    }

    #[test]
    fn port_0_takes_any_port_of_its_address() {
        assert!(tcp("127.0.0.1:0").takes(&tcp("127.0.0.1:9")));
        assert!(!tcp("127.0.0.1:0").takes(&tcp("0.0.0.0:9")));
    }

    #[test]
    fn what_takes_no_connections_is_refused_with_its_reason() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(
            PassedListener::of(one.into())
                .unwrap_err()
                .contains("Accept=no")
        );
        assert!(PassedListener::of(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }
}
