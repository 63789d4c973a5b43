//! Settings of spans, events and metrics.

use std::path::PathBuf;

use super::{
    Otlp, OtlpConfig, TelemetryConfig,
    checker::Checker,
    raw::{RawTelemetry, Text},
};

pub(super) fn check(checker: &mut Checker, raw: &RawTelemetry) -> TelemetryConfig {
    TelemetryConfig {
        otlp: otlp(checker, &raw.otlp),
        otlp_ca: checker
            .directory("telemetry.otlp_ca", &raw.otlp_ca)
            .unwrap_or_else(|| PathBuf::from("/etc/ssl/certs/ca-certificates.crt")),
        otlp_events: checker
            .switch("telemetry.otlp_events", &raw.otlp_events)
            .unwrap_or(false),
        vllm_names: checker
            .switch("telemetry.vllm_names", &raw.vllm_names)
            .unwrap_or(false),
    }
}

fn otlp(checker: &mut Checker, text: &Text) -> Otlp {
    let Some(written) = checker.given("telemetry.otlp", text) else {
        return Otlp::Environment;
    };
    if written == "none" {
        return Otlp::Off;
    }
    parsed(written).map_or_else(
        || {
            checker.fault(
                "telemetry.otlp",
                format!("`{}` is not an address", written.escape_debug()),
                Some(HINT),
            );
            Otlp::Off
        },
        Otlp::To,
    )
}

impl Otlp {
    /// The collector: that of the configuration, and without one there that of `OTEL_EXPORTER_OTLP_ENDPOINT` and
    /// `OTEL_EXPORTER_OTLP_PROTOCOL` (`http/protobuf`, the default, or `grpc`).
    ///
    /// # Errors
    ///
    /// Endpoint and protocol of the variables if spans cannot be sent there.
    pub fn collector(
        self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<OtlpConfig>, (String, String)> {
        let set = |name: &str| variable(name).filter(|text| !text.is_empty());
        match self {
            Self::To(collector) => return Ok(Some(collector)),
            Self::Off => return Ok(None),
            Self::Environment => {}
        }
        let Some(endpoint) = set("OTEL_EXPORTER_OTLP_ENDPOINT") else {
            return Ok(None);
        };
        let protocol = set("OTEL_EXPORTER_OTLP_PROTOCOL").unwrap_or_else(|| HTTP.to_owned());
        let base = endpoint.trim_end_matches('/');
        let address = match (protocol.as_str(), base.split_once("://")) {
            (HTTP, Some(("http" | "https", _))) => Some(format!("{base}/v1/traces")),
            ("grpc", Some(("http", rest))) => Some(format!("grpc://{rest}")),
            ("grpc", Some(("https", rest))) => Some(format!("grpcs://{rest}")),
            _ => None,
        };
        match address.as_deref().and_then(parsed) {
            Some(collector) => Ok(Some(collector)),
            None => Err((endpoint, protocol)),
        }
    }
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

/// OpenTelemetry's name of protobuf over HTTP.
const HTTP: &str = "http/protobuf";

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

    #[test]
    fn the_environment_names_the_collector_of_a_configuration_without_one() {
        let of = |otlp: Otlp, endpoint: &str, protocol: &str| {
            let found = otlp.collector(|name| {
                let text = match name {
                    "OTEL_EXPORTER_OTLP_ENDPOINT" => endpoint,
                    "OTEL_EXPORTER_OTLP_PROTOCOL" => protocol,
                    _ => return None,
                };
                Some(text.to_owned())
            });
            found.map(|collector| {
                collector.map(|otlp| (otlp.grpc, otlp.tls, otlp.authority + &otlp.path))
            })
        };
        for (endpoint, protocol, expected) in [
            ("", "", None),
            (
                "http://c:4318",
                "",
                Some((false, false, "c:4318/v1/traces")),
            ),
            (
                "https://c:443/otlp/",
                "http/protobuf",
                Some((false, true, "c:443/otlp/v1/traces")),
            ),
            ("http://c:4317/", "grpc", Some((true, false, "c:4317"))),
            ("https://c", "grpc", Some((true, true, "c:4317"))),
        ] {
            let expected = expected.map(|(grpc, tls, place)| (grpc, tls, place.to_owned()));
            let found = of(Otlp::Environment, endpoint, protocol);
            assert_eq!(found, Ok(expected), "{endpoint} {protocol}");
            assert_eq!(of(Otlp::Off, endpoint, protocol), Ok(None));
        }
        let written = Otlp::To(parsed("grpc://own").unwrap());
        let found = of(written, "http://other", "").unwrap().unwrap();
        assert_eq!(found.2, "own:4317");
        for (endpoint, protocol) in [
            ("c:4317", "grpc"),
            ("http://c", "http/json"),
            ("http://c/path", "grpc"),
        ] {
            assert!(
                of(Otlp::Environment, endpoint, protocol).is_err(),
                "{endpoint} {protocol}"
            );
        }
    }
}
