//! Host names and origins permitted for browsers.
//!
//! A page of another site can make its own name resolve to our address (DNS rebinding) and then read answers as
//! same-origin. Its requests have that name in `Host` and the site in `Origin`; both are checked first. Pages of
//! allowed hosts are admitted by CORS.

use std::{net::IpAddr, sync::OnceLock};

use axum::{
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, Version, header, uri::Authority},
    response::{IntoResponse, Response},
};

use super::fault::{Fault, shortened};

/// How a listener can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// TCP, from this machine.
    Loopback,
    /// TCP, from other machines too.
    Network,
    /// A Unix socket, which browsers cannot reach.
    Socket,
    /// TCP, from a trusted reverse proxy.
    Proxy,
}

/// Address at the remote end of a connection; `None` for a Unix socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(pub(super) Option<IpAddr>);

/// Refuses browser requests made by pages of foreign sites.
///
/// # Errors
/// 400 without a host name where HTTP requires one, 421 for a foreign host name, 403 for a foreign origin.
pub(super) fn check(
    reach: Reach,
    version: Version,
    uri: &Uri,
    headers: &HeaderMap,
    allowed: &[String],
) -> Result<(), Fault> {
    let hosts = headers.get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && version == Version::HTTP_11) {
        let message =
            format!("cannot serve a request with {hosts} `Host` headers: HTTP/1.1 demands one");
        return Err(Fault::bad_request("invalid_host", message));
    }
    if matches!(reach, Reach::Socket | Reach::Proxy) {
        return Ok(());
    }
    let values = |name| headers.get_all(name).iter();
    let named: Vec<String> = values(header::HOST)
        .map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned())
        .chain(uri.authority().map(ToString::to_string))
        .collect();
    for host in &named {
        // Another site cannot have a bare address as its name; on loopback only addresses of this machine are valid.
        let is_address = |name: &str| reach == Reach::Network && address(name).is_some();
        if !name_of(host).is_some_and(|name| is_ours(&name, allowed) || is_address(&name)) {
            return Err(Fault::request(
                StatusCode::MISDIRECTED_REQUEST,
                "host_not_allowed",
                format!(
                    "not served under the host name `{}` (hint: list it in `http.allowed_hosts`, or use {})",
                    shortened(host),
                    if reach == Reach::Network {
                        "the address of this machine"
                    } else {
                        "`localhost`"
                    }
                ),
            ));
        }
    }
    for origin in values(header::ORIGIN) {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        let authority = origin
            .split_once("://")
            .map_or("", |(_, authority)| authority);
        let same = reach == Reach::Network
            && named
                .iter()
                .any(|host| host.eq_ignore_ascii_case(authority));
        if !same && !name_of(authority).is_some_and(|name| is_ours(&name, allowed)) {
            return Err(Fault::request(
                StatusCode::FORBIDDEN,
                "origin_not_allowed",
                format!(
                    "not allowed from a page of `{}` (hint: {})",
                    shortened(&origin),
                    if authority.is_empty() {
                        "serve the page from a host that is listed in `http.allowed_hosts`"
                    } else {
                        "list its host in `http.allowed_hosts`"
                    }
                ),
            ));
        }
    }
    Ok(())
}

/// The response to a CORS preflight request that [`check`] has admitted.
pub(super) fn preflight(headers: &HeaderMap) -> Option<Response> {
    headers.get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
    let mut answer = HeaderMap::new();
    answer.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("GET, HEAD, POST"),
    );
    if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    if headers.contains_key(REQUEST_PRIVATE_NETWORK) {
        answer.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
    }
    answer.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static("600"),
    );
    Some((StatusCode::NO_CONTENT, answer).into_response())
}

/// Permits a page of an allowed origin to read the answer.
pub(super) fn readable_by(origin: &HeaderValue, response: &mut Response) {
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    headers.insert(
        header::ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static("*"),
    );
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

/// The host of `host:port`, in lower case and without a trailing dot.
fn name_of(authority: &str) -> Option<String> {
    let authority = Authority::try_from(authority).ok()?;
    let host = bare(authority.host())
        .trim_end_matches('.')
        .to_ascii_lowercase();
    (!host.is_empty()).then_some(host)
}

/// An IPv6 address without its brackets.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Whether the name is configured, or denotes this machine and cannot belong to another site.
fn is_ours(name: &str, allowed: &[String]) -> bool {
    name == "localhost"
        || name.ends_with(".localhost")
        || own_names().iter().any(|own| own == name)
        || address(name).is_some_and(|address| address.to_canonical().is_loopback())
        || allowed
            .iter()
            .any(|allowed| bare(allowed).eq_ignore_ascii_case(name))
}

/// The names of this machine: its host name, and the multicast DNS name.
fn own_names() -> &'static [String] {
    static NAMES: OnceLock<Vec<String>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let name = nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok());
        let Some(name) = name
            .map(|name| name.to_ascii_lowercase())
            .filter(|name| !name.is_empty())
        else {
            return Vec::new();
        };
        let first = name.split('.').next().unwrap_or_default().to_owned();
        vec![format!("{first}.local"), first, name]
    })
}

fn address(name: &str) -> Option<IpAddr> {
    name.parse().ok()
}

/// Sent by Chrome for a page of a public site.
const REQUEST_PRIVATE_NETWORK: HeaderName =
    HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE_NETWORK: HeaderName =
    HeaderName::from_static("access-control-allow-private-network");

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(reach: Reach, host: &str, origin: &str, allowed: &[&str]) -> u16 {
        let mut headers = HeaderMap::new();
        for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
            if !value.is_empty() {
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
        }
        let allowed: Vec<String> = allowed.iter().map(|&name| name.to_owned()).collect();
        let version = if host.is_empty() {
            Version::HTTP_10
        } else {
            Version::HTTP_11
        };
        check(
            reach,
            version,
            &Uri::from_static("/v1/models"),
            &headers,
            &allowed,
        )
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
            assert_eq!(
                checked(Reach::Loopback, "localhost:8410", origin, &["box.lan"]),
                status,
                "{origin}"
            );
        }
        assert_eq!(
            checked(
                Reach::Network,
                "192.168.1.7:8410",
                "http://192.168.1.7:8410",
                &[]
            ),
            200
        );
        assert_eq!(
            checked(
                Reach::Network,
                "192.168.1.7:8410",
                "http://192.168.1.7:9000",
                &[]
            ),
            403
        );
    }

    #[test]
    fn a_listener_for_others_has_addresses_its_own_names_and_configured_ones() {
        let own = own_names();
        assert!(own.iter().any(|name| name.ends_with(".local")), "{own:?}");
        for name in own.iter().map(String::as_str).chain([
            "192.168.1.7:8410",
            "[fe80::1]:8410",
            "localhost",
            "box.lan",
        ]) {
            assert_eq!(
                checked(Reach::Network, name, "", &["box.lan"]),
                200,
                "{name}"
            );
            assert_eq!(
                checked(
                    Reach::Network,
                    name,
                    &format!("http://{name}"),
                    &["box.lan"]
                ),
                200,
                "{name}"
            );
        }
        for name in ["evil.example", "192.168.1.7.evil.example", "a b"] {
            assert_eq!(checked(Reach::Network, name, "", &[]), 421, "{name}");
            assert_eq!(
                checked(Reach::Network, name, "", &["box.lan"]),
                421,
                "{name}"
            );
            assert_eq!(
                checked(Reach::Network, name, &format!("http://{name}"), &[]),
                421,
                "{name}"
            );
        }
        assert_eq!(
            checked(Reach::Network, "192.168.1.7", "https://evil.example", &[]),
            403
        );
        assert_eq!(
            checked(Reach::Socket, "anything", "https://evil.example", &[]),
            200
        );
    }

    #[test]
    fn a_request_names_one_host() {
        let of = |version, hosts: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, HeaderValue::from_static(host));
            }
            let checked = check(
                Reach::Socket,
                version,
                &Uri::from_static("/health"),
                &headers,
                &[],
            );
            checked.map_or_else(|fault| fault.status().as_u16(), |()| 200)
        };
        assert_eq!(of(Version::HTTP_11, &[]), 400);
        assert_eq!(of(Version::HTTP_11, &["localhost", "localhost"]), 400);
        assert_eq!(of(Version::HTTP_11, &["localhost"]), 200);
        assert_eq!(of(Version::HTTP_10, &[]), 200);
    }
}
