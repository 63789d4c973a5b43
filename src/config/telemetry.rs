//! Settings of spans and metrics.

use std::path::PathBuf;

use super::{
    OtlpConfig, TelemetryConfig,
    checker::Checker,
    raw::{RawTelemetry, Text},
};

pub(super) fn check(checker: &mut Checker, raw: &RawTelemetry) -> TelemetryConfig {
    TelemetryConfig {
        otlp: otlp(checker, &raw.otlp),
        otlp_ca: checker
            .directory("telemetry.otlp_ca", &raw.otlp_ca)
            .unwrap_or_else(|| PathBuf::from("/etc/ssl/certs/ca-certificates.crt")),
        vllm_names: checker
            .switch("telemetry.vllm_names", &raw.vllm_names)
            .unwrap_or(false),
    }
}

fn otlp(checker: &mut Checker, text: &Text) -> Option<OtlpConfig> {
    let written = checker.given("telemetry.otlp", text)?;
    if written == "none" {
        return None;
    }
    let parsed = parsed(written);
    if parsed.is_none() {
        checker.fault(
            "telemetry.otlp",
            format!("`{}` is not an address", written.escape_debug()),
            Some(HINT),
        );
    }
    parsed
}

fn parsed(written: &str) -> Option<OtlpConfig> {
    let (scheme, rest) = written.split_once("://")?;
    let (grpc, tls, port) = match scheme {
        "grpc" => (true, false, GRPC_PORT),
        "grpcs" => (true, true, GRPC_PORT),
        "http" => (false, false, HTTP_PORT),
        "https" => (false, true, HTTP_PORT),
        _ => return None,
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    // An IPv6 address in brackets contains colons.
    let host_end = authority.rfind(']').map_or(0, |end| end + 1);
    let (host, number) = match authority.get(host_end..)?.find(':') {
        Some(colon) => authority.split_at_checked(host_end + colon)?,
        None => (authority, ""),
    };
    let port = match number.strip_prefix(':') {
        Some(number) => number.parse::<u16>().ok().filter(|port| *port > 0)?,
        None => port,
    };
    let sane = |text: &str| {
        text.bytes()
            .all(|byte| byte.is_ascii_graphic() && !b"@?#\"\\<>".contains(&byte))
    };
    if host.is_empty()
        || host.len() > HOST_MAX
        || path.len() > PATH_MAX
        || !sane(host)
        || !sane(path)
    {
        return None;
    }
    let path = match path {
        "" | "/" if !grpc => "/v1/traces",
        "" | "/" => "",
        // gRPC has no path.
        _ if grpc => return None,
        path => path,
    };
    Some(OtlpConfig {
        grpc,
        tls,
        authority: format!("{host}:{port}"),
        path: path.to_owned(),
    })
}

const HINT: &str = "write the address of a collector: `grpc://127.0.0.1:4317`, `grpcs://…`, `http://127.0.0.1:4318` or \
                    `https://…`, or `none`";

/// Ports assigned to OTLP for both protocols.
const GRPC_PORT: u16 = 4317;
const HTTP_PORT: u16 = 4318;

/// Maximum length of a host name (RFC 1035), and of a path (our choice).
const HOST_MAX: usize = 253;
const PATH_MAX: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_ports_and_paths_of_their_protocol() {
        let of = |text: &str| {
            parsed(text).map(|otlp| {
                let words = match (otlp.grpc, otlp.tls) {
                    (true, true) => "grpc with TLS",
                    (true, false) => "grpc",
                    (false, true) => "http with TLS",
                    (false, false) => "http",
                };
                format!("{words} {}{}", otlp.authority, otlp.path)
            })
        };
        for (text, expected) in [
            ("grpc://collector", Some("grpc collector:4317")),
            (
                "grpcs://collector:443/",
                Some("grpc with TLS collector:443"),
            ),
            ("http://127.0.0.1", Some("http 127.0.0.1:4318/v1/traces")),
            ("http://[::1]:9/", Some("http [::1]:9/v1/traces")),
            ("http://[::1]", Some("http [::1]:4318/v1/traces")),
            (
                "https://otlp.example/v1/spans",
                Some("http with TLS otlp.example:4318/v1/spans"),
            ),
            ("collector:4317", None),
            ("grpc://", None),
            ("grpc://collector/path", None),
            ("http://collector:0", None),
            ("http://collector:99999", None),
            ("http://user@collector", None),
            ("http://a b", None),
            ("ftp://collector", None),
        ] {
            assert_eq!(of(text).as_deref(), expected, "{text}");
        }
    }
}
