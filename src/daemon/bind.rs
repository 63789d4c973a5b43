//! TCP listeners on addresses that the machine may not have yet.
//!
//! At boot, the network may start after the supervisor, and a wireless address may disappear and return. Linux permits
//! listening on an address that no interface has (`IP_FREEBIND`, ip(7)), and accepts connections once one has it.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsFd, AsRawFd as _},
};

use nix::errno::Errno;
use tokio::net::TcpSocket;

/// Listens on an address, whether or not the machine has it now.
///
/// # Errors
/// If it is in use, this user may not listen on it, or the kernel cannot bind a missing address.
pub(super) fn listen(key: &str, address: SocketAddr) -> io::Result<TcpListener> {
    let open = || {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        socket.set_reuseaddr(true)?;
        Ok::<_, io::Error>(socket)
    };
    let mut socket = open()?;
    match socket.bind(address) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            socket = open()?;
            // If the option is not supported, the first error names the cause.
            bind_freely(&socket, address).map_err(|_without| error)?;
            socket.bind(address)?;
            tracing::warn!(
                "`{key}: {address}` is not an address of this machine; it is served once the machine has it"
            );
        }
        bound => bound?,
    }
    socket.listen(BACKLOG)?.into_std()
}

/// Returns whether an interface has this address.
pub fn is_here(address: IpAddr) -> bool {
    // This sends no packet, and uses no TCP port.
    let bound = UdpSocket::bind((address, 0));
    !bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

fn bind_freely(socket: &impl AsFd, address: SocketAddr) -> io::Result<()> {
    let (level, option) = if address.is_ipv4() {
        (libc::SOL_IP, libc::IP_FREEBIND)
    } else {
        (libc::SOL_IPV6, libc::IPV6_FREEBIND)
    };
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of_val(&on)).unwrap_or_default();
    // SAFETY: the descriptor is open, and the kernel reads `length` bytes of `on`.
    let set = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(&on).cast(),
            length,
        )
    };
    Ok(Errno::result(set).map(drop)?)
}

/// Bound of the queue of connections to accept; the runtime's value for its own listeners.
const BACKLOG: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// Documentation addresses (RFC 5737, RFC 3849), which no machine has.
    const ABSENT: [&str; 2] = ["192.0.2.7:0", "[2001:db8::7]:0"];

    #[tokio::test]
    async fn an_address_that_no_interface_has_is_listened_on_and_named() {
        for address in ABSENT {
            let address: SocketAddr = address.parse().unwrap();
            let listener = match listen("http.listen", address) {
                Ok(listener) => listener,
                Err(error)
                    if address.is_ipv6() && error.raw_os_error() == Some(libc::EAFNOSUPPORT) =>
                {
                    println!("left out: no IPv6 here: {error}");
                    continue;
                }
                Err(error) => panic!("{address}: {error}"),
            };
            assert_eq!(listener.local_addr().unwrap().ip(), address.ip());
            assert!(!is_here(address.ip()));
            // A second listener on the same port is still refused.
            let taken = listen("http.listen", listener.local_addr().unwrap()).unwrap_err();
            assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        }
    }

    #[tokio::test]
    async fn addresses_of_this_machine_are_here_and_a_port_in_use_is_an_error() {
        for address in ["127.0.0.1:0", "0.0.0.0:0"] {
            let address: SocketAddr = address.parse().unwrap();
            let listener = listen("http.listen", address).unwrap();
            assert!(is_here(address.ip()));
            let taken = listen("http.listen", listener.local_addr().unwrap()).unwrap_err();
            assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        }
    }
}
