//! HTTP client of `pull`: requests by range, bounded redirects, faults that may pass.

use std::{env, io, sync::Arc, time::Duration};

use serde_json::Value;
use ureq::{
    Body, BodyReader,
    config::RedirectAuthHeaders,
    http::{HeaderValue, Response, StatusCode, header},
    tls::{Certificate, RootCerts, TlsConfig},
};

use crate::exit::{self, CliError};
use cotenant_telemetry::build_name;
use cotenant_units::Bytes;

/// A client with its limits.
pub(super) struct Client {
    agent: ureq::Agent,
    access: Access,
    patience: Patience,
}

/// The hub that takes a token. It is sent to URLs below `base` alone, and to the same host by redirects.
pub(super) struct Access {
    /// Such as `https://huggingface.co/`.
    pub base: String,
    /// The value of `HF_TOKEN`.
    pub token: Option<String>,
}

/// Limits of waiting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Longest time without a byte.
    pub stall: Duration,
    /// Attempts in a row without progress.
    pub attempts: u32,
    /// Pause after the first of them, doubled by each.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            stall: Duration::from_secs(30),
            attempts: 6,
            pause: Duration::from_secs(1),
        }
    }
}

/// A failed request.
#[derive(Debug)]
pub(super) enum Fault {
    /// Another attempt may succeed.
    Passing(CliError),
    /// Every attempt would fail.
    Final(CliError),
}

/// A response that continues a file.
pub(super) struct Opened {
    /// The bytes.
    pub reader: BodyReader<'static>,
    /// Position of the first.
    pub from: u64,
    /// Length of the file.
    pub total: u64,
    /// Its version, as `If-Range` takes it.
    pub validator: Option<String>,
}

impl Client {
    /// A client with the proxies of the environment.
    pub(super) fn new(access: Access, patience: Patience) -> Result<Self, CliError> {
        refuse_unusable_proxies()?;
        let roots: Vec<_> = rustls_native_certs::load_native_certs()
            .certs
            .iter()
            .map(|root| Certificate::from_der(root).to_owned())
            .collect();
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&roots))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let agent = ureq::Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .user_agent(format!("cotenant/{}", build_name::version()))
            .max_redirects(REDIRECTS_MAX)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_resolve(Some(patience.stall))
            .timeout_connect(Some(patience.stall))
            .timeout_recv_response(Some(patience.stall))
            .timeout_per_read(Some(patience.stall))
            .timeout_per_write(Some(patience.stall))
            .build()
            .into();
        Ok(Self {
            agent,
            access,
            patience,
        })
    }

    /// The limits of waiting.
    pub(super) const fn patience(&self) -> Patience {
        self.patience
    }

    /// A JSON document of a hub.
    pub(super) fn json(&self, url: &str, accept: &str) -> Result<Value, CliError> {
        self.patiently(|| self.json_once(url, accept))
    }

    /// Repeats a request while it fails in passing.
    pub(super) fn patiently<T>(
        &self,
        request: impl Fn() -> Result<T, Fault>,
    ) -> Result<T, CliError> {
        let mut attempt = 1;
        loop {
            match request() {
                Ok(value) => return Ok(value),
                Err(Fault::Passing(_)) if attempt < self.patience.attempts => {
                    std::thread::sleep(self.patience.pause_after(attempt));
                    attempt += 1;
                }
                Err(Fault::Passing(error) | Fault::Final(error)) => return Err(error),
            }
        }
    }

    fn json_once(&self, url: &str, accept: &str) -> Result<Value, Fault> {
        let mut response = self.get(url, &[(header::ACCEPT.as_str(), accept)])?;
        let unusable = |problem: &str| {
            Fault::Final(CliError::plain(
                format!("`{}` is unusable: {problem}", shown(url)),
                exit::FAILED,
            ))
        };
        let links = response.headers().get_all(header::LINK);
        let is_next = |link: &HeaderValue| {
            link.to_str()
                .is_ok_and(|link| link.contains("rel=\"next\""))
        };
        if links.iter().any(is_next) {
            return Err(unusable(
                "the repository has more files than one page of its list",
            ));
        }
        let body = response.body_mut().with_config().limit(JSON_BYTES_MAX);
        let bytes = match body.read_to_vec() {
            Err(ureq::Error::BodyExceedsLimit(_)) => {
                let limit = Bytes::new(JSON_BYTES_MAX);
                return Err(unusable(&format!("it has more than {limit}")));
            }
            read => read.map_err(|error| fault(url, error))?,
        };
        serde_json::from_slice(&bytes).map_err(|error| unusable(&error.to_string()))
    }

    /// The file at `url` from byte `from` on, or from its beginning if the server does not serve ranges or the file is
    /// no longer that of `validator`.
    pub(super) fn open(
        &self,
        url: &str,
        from: u64,
        validator: Option<&str>,
    ) -> Result<Opened, Fault> {
        let range = format!("bytes={from}-");
        let mut headers = vec![(header::RANGE.as_str(), range.as_str())];
        headers.extend(validator.map(|version| (header::IF_RANGE.as_str(), version)));
        let response = self.get(url, &headers)?;
        let refused = |problem: &str| {
            let act = format!("invalid response from `{}`: {problem}", shown(url));
            Fault::Final(CliError::plain(act, exit::FAILED))
        };
        let text = |name: header::HeaderName| response.headers().get(name)?.to_str().ok();
        if text(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
            return Err(refused("it is compressed, which was not requested"));
        }
        let (from, total) = if response.status() == StatusCode::PARTIAL_CONTENT {
            let range = text(header::CONTENT_RANGE).unwrap_or_default();
            content_range(range).ok_or_else(|| refused("`content-range` is missing or invalid"))?
        } else {
            let length = text(header::CONTENT_LENGTH).and_then(|length| length.parse().ok());
            (0, length.ok_or_else(|| refused("it has no length"))?)
        };
        // A weak tag does not promise equal bytes.
        let tag = text(header::ETAG).filter(|tag| !tag.starts_with("W/"));
        let validator = tag.or_else(|| text(header::LAST_MODIFIED));
        Ok(Opened {
            validator: validator.map(str::to_owned),
            reader: response.into_body().into_reader(),
            from,
            total,
        })
    }

    fn get(&self, url: &str, headers: &[(&str, &str)]) -> Result<Response<Body>, Fault> {
        let is_secure = url.starts_with("https://");
        let mut request = self.agent.get(url).config().https_only(is_secure).build();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let takes_token = url.starts_with(&self.access.base);
        let token = self.access.token.as_ref().filter(|_| takes_token);
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let response = request.call().map_err(|error| fault(url, error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let reason = response.headers().get("x-error-message");
        let reason = reason.and_then(|reason| reason.to_str().ok());
        let act = format!("`{}` answered {status}", shown(url));
        let error = match reason {
            Some(reason) => {
                let reason: String = reason.chars().take(REASON_CHARS_MAX).collect();
                CliError::failed(act, io::Error::other(reason))
            }
            None => CliError::plain(act, exit::FAILED),
        };
        Err(match status.as_u16() {
            401 | 403 => Fault::Final(error.with_hint(match token {
                Some(_) => WITHOUT_ACCESS.to_owned(),
                None if takes_token => WITHOUT_TOKEN.to_owned(),
                None => "check the name; a server with a login is not supported".to_owned(),
            })),
            404 | 410 => Fault::Final(error.with_hint("check the name and the tag".to_owned())),
            408 | 429 | 500..=599 => Fault::Passing(error),
            _ => Fault::Final(error),
        })
    }
}

impl Patience {
    /// The pause after so many attempts in a row without progress.
    pub(super) fn pause_after(self, attempts: u32) -> Duration {
        self.pause
            .saturating_mul(1 << attempts.saturating_sub(1).min(5))
    }
}

/// A failed read of a response, which may pass.
pub(super) fn cut(url: &str, error: io::Error) -> Fault {
    Fault::Passing(CliError::failed(
        format!("the transfer from `{}` was interrupted", shown(url)),
        error,
    ))
}

/// A URL without what may be secret in it.
pub(super) fn shown(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

fn fault(url: &str, error: ureq::Error) -> Fault {
    let is_certificate = |error: &io::Error| {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
    };
    let (passes, hint) = match &error {
        ureq::Error::Io(error) if is_certificate(error) => (false, Some(UNVERIFIED)),
        ureq::Error::RequireHttpsOnly(_) => {
            (false, Some("the server redirects from https to http"))
        }
        ureq::Error::HostNotFound => (true, Some(UNREACHABLE)),
        // The last one: the connection ended within the head of the response.
        ureq::Error::Io(_)
        | ureq::Error::Timeout(_)
        | ureq::Error::ConnectionFailed
        | ureq::Error::Protocol(_) => (true, None),
        _ => (false, None),
    };
    let hint = hint.map(str::to_owned);
    let act = format!("cannot fetch `{}`", shown(url));
    let error = match error {
        ureq::Error::Io(error) => CliError::failed(act, error),
        error => CliError::failed(act, error),
    };
    let error = error.with_hint(hint);
    if passes {
        Fault::Passing(error)
    } else {
        Fault::Final(error)
    }
}

/// First byte and length of the file, from `bytes 5-9/10`.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total) = (
        first.parse().ok()?,
        last.parse::<u64>().ok()?,
        total.parse().ok()?,
    );
    (first <= last && last < total).then_some((first, total))
}

/// A proxy that cannot be used would silently be left out.
fn refuse_unusable_proxies() -> Result<(), CliError> {
    const NAMES: [&str; 3] = ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"];
    for name in NAMES
        .map(str::to_owned)
        .into_iter()
        .chain(NAMES.map(str::to_lowercase))
    {
        let Some(value) = env::var_os(&name).filter(|value| !value.is_empty()) else {
            continue;
        };
        let proxy = value.to_str().ok_or(ureq::Error::InvalidProxyUrl);
        proxy
            .and_then(ureq::Proxy::new)
            .map_err(|error| CliError::failed(format!("cannot use {name}"), error))?;
    }
    Ok(())
}

const UNVERIFIED: &str =
    "install the package `ca-certificates`, or name the server's CA in SSL_CERT_FILE";
const UNREACHABLE: &str = "check the network, and HTTPS_PROXY behind a proxy";
const WITHOUT_TOKEN: &str =
    "check the name; if it is private or gated, accept its terms on its page, and set HF_TOKEN";
const WITHOUT_ACCESS: &str =
    "check the name; if it is gated, accept its terms on its page with the account of HF_TOKEN";

/// A hub redirects to its store once or twice.
const REDIRECTS_MAX: u32 = 5;
/// The list of a repository with 1000 files has some 300 KiB.
const JSON_BYTES_MAX: u64 = 16 << 20;
/// Our choice: two lines of a terminal.
const REASON_CHARS_MAX: usize = 160;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_taken_only_when_it_lies_within_the_file() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, 10)));
        for text in [
            "",
            "bytes */10",
            "bytes 5-9/*",
            "bytes 9-5/10",
            "bytes 5-10/10",
            "items 5-9/10",
        ] {
            assert_eq!(content_range(text), None, "{text}");
        }
    }

    #[test]
    fn what_may_be_secret_in_a_url_is_not_shown() {
        assert_eq!(shown("https://a/b?token=c#d"), "https://a/b");
    }
}
