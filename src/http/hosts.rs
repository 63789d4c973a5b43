//! Host names and origins under which browsers may reach the APIs.
//!
//! A page of another site can make its own name resolve to our address (DNS rebinding), and then reads answers as its own.
//! Its requests carry that name in `Host`, and the site in `Origin`: both are checked before anything else.

use std::net::IpAddr;

use axum::http::{HeaderMap, StatusCode, Uri, header, uri::Authority};

use super::fault::{Fault, shortened};

/// How a listener can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// By TCP, from this machine.
    Loopback,
    /// By TCP, from others too.
    Network,
    /// By a Unix socket, which no browser speaks to.
    Socket,
}

/// Refuses what a page of a foreign site has a browser send.
///
/// # Errors
/// 421 for a host name that is not ours, 403 for an origin that is not.
pub(super) fn check(reach: Reach, uri: &Uri, headers: &HeaderMap, allowed: &[String]) -> Result<(), Fault> {
    if reach == Reach::Socket {
        return Ok(());
    }
    let values = |name| headers.get_all(name).iter();
    let named: Vec<String> = values(header::HOST)
        .map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned())
        .chain(uri.authority().map(ToString::to_string))
        .collect();
    for host in &named {
        let name = name_of(host);
        let known = name
            .as_deref()
            .is_some_and(|name| is_ours(name, allowed) || (reach == Reach::Network && is_possible(name, allowed)));
        if !known {
            return Err(Fault::request(
                StatusCode::MISDIRECTED_REQUEST,
                "host_not_allowed",
                format!(
                    "not served under the host name `{}` (hint: list it in `http.allowed_hosts`, or use `localhost`)",
                    shortened(host)
                ),
            ));
        }
    }
    for origin in values(header::ORIGIN) {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
        let same = reach == Reach::Network && named.iter().any(|host| host.eq_ignore_ascii_case(authority));
        if !same && !name_of(authority).is_some_and(|name| is_ours(&name, allowed)) {
            return Err(Fault::request(
                StatusCode::FORBIDDEN,
                "origin_not_allowed",
                format!(
                    "not allowed from a page of `{}` (hint: list its host in `http.allowed_hosts`)",
                    shortened(&origin)
                ),
            ));
        }
    }
    Ok(())
}

/// The host of `host:port`, in lower case and without a dot at its end.
fn name_of(authority: &str) -> Option<String> {
    let authority = Authority::try_from(authority).ok()?;
    let host = bare(authority.host()).trim_end_matches('.').to_ascii_lowercase();
    (!host.is_empty()).then_some(host)
}

/// An address of IPv6 without its brackets.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// This machine by a name that no other site can have, or a configured one.
fn is_ours(name: &str, allowed: &[String]) -> bool {
    name == "localhost"
        || name.ends_with(".localhost")
        || address(name).is_some_and(|address| address.to_canonical().is_loopback())
        || allowed.iter().any(|allowed| bare(allowed).eq_ignore_ascii_case(name))
}

/// What a listener for others may be called: its address, and any name where none is configured.
fn is_possible(name: &str, allowed: &[String]) -> bool {
    allowed.is_empty() || address(name).is_some()
}

fn address(name: &str) -> Option<IpAddr> {
    name.parse().ok()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn checked(reach: Reach, host: &str, origin: &str, allowed: &[&str]) -> u16 {
        let mut headers = HeaderMap::new();
        for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
            if !value.is_empty() {
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
        }
        let allowed: Vec<String> = allowed.iter().map(|&name| name.to_owned()).collect();
        check(reach, &Uri::from_static("/v1/models"), &headers, &allowed)
            .map_or_else(|fault| fault.status().as_u16(), |()| 200)
    }

    #[test]
    fn a_loopback_listener_is_served_under_names_of_this_machine_and_configured_ones() {
        let host = |host| checked(Reach::Loopback, host, "", &["Box.lan"]);
        for name in [
            "localhost",
            "LOCALHOST:8410",
            "app.localhost",
            "localhost.",
            "127.0.0.1:8410",
            "127.9.9.9",
            "[::1]:8410",
            "box.lan:80",
            "",
        ] {
            assert_eq!(host(name), 200, "{name}");
        }
        for name in [
            "evil.example",
            "localhost.evil.example",
            "evil-localhost",
            "0.0.0.0:8410",
            "192.168.1.7",
            "other.lan",
            "127.0.0.1.evil.example",
            "[::]",
            "a b",
            "@",
        ] {
            assert_eq!(host(name), 421, "{name}");
        }
    }

    #[test]
    fn an_origin_is_ours_or_the_host_itself() {
        for (origin, status) in [
            ("http://localhost:3000", 200),
            ("http://127.0.0.1:8410", 200),
            ("tauri://localhost", 200),
            ("https://box.lan", 200),
            ("https://evil.example", 403),
            ("http://localhost.evil.example", 403),
            ("null", 403),
            ("http://", 403),
        ] {
            assert_eq!(checked(Reach::Loopback, "localhost:8410", origin, &["box.lan"]), status, "{origin}");
        }
        assert_eq!(checked(Reach::Network, "box.lan:8410", "http://box.lan:8410", &[]), 200);
        assert_eq!(checked(Reach::Network, "box.lan:8410", "http://box.lan:9000", &[]), 403);
    }

    #[test]
    fn a_listener_for_others_has_any_name_until_some_are_configured() {
        assert_eq!(checked(Reach::Network, "evil.example", "", &[]), 200);
        assert_eq!(checked(Reach::Network, "evil.example", "", &["box.lan"]), 421);
        assert_eq!(checked(Reach::Network, "192.168.1.7:8410", "", &["box.lan"]), 200);
        assert_eq!(checked(Reach::Socket, "anything", "https://evil.example", &[]), 200);
    }
}
