//! Access to the APIs: host names and API keys, replaceable while they are served.

use std::{fmt, hint::black_box, net::IpAddr, sync::Arc};

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::fault::{Fault, shortened};
use cotenant_conversation::{refusal::Refusal, refusals::at_limit};
use cotenant_policy::{lease::Class, roles::Role};
use cotenant_units::Tokens;

/// Access rules of the APIs.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Host names, besides those of this machine, under which the APIs are served.
    pub hosts: Vec<String>,
    /// Reverse proxies that check host names and origins themselves.
    pub proxies: Vec<IpAddr>,
    /// Clients with keys; `None` when every client is served.
    pub clients: Option<Vec<Arc<Client>>>,
    /// Endpoints that need no key.
    pub keyless: Keyless,
}

/// Endpoints that are served without a key although clients have keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keyless {
    /// `GET /health`.
    pub health: bool,
    /// `GET /metrics`.
    pub metrics: bool,
}

/// A key; shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The key as clients send it.
    pub const fn new(key: String) -> Self {
        Self(key)
    }

    /// Compares in a time that depends only on the length of `sent`.
    fn is(&self, sent: &[u8]) -> bool {
        let known = self.0.as_bytes();
        let mut differ = u8::from(known.len() != sent.len());
        for (at, byte) in sent.iter().enumerate() {
            // Past the end any byte will do: the lengths already differ.
            differ |= byte ^ black_box(known.get(at).copied().unwrap_or_default());
        }
        black_box(differ) == 0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// A client with a key.
#[derive(Debug)]
pub struct Client {
    /// Name in events and logs.
    pub name: Arc<str>,
    key: Key,
    /// How urgent its requests are for the LLM.
    pub class: Class,
    /// Operators may shed, regrow and restart workers; others only look.
    pub role: Role,
    /// Most tokens of one answer.
    pub tokens_max: Option<Tokens>,
    requests_max: u32,
    places: Arc<Semaphore>,
}

impl Client {
    /// A client without requests in flight; takes over those of `before` if name and limit are equal.
    pub fn new(
        (name, key): (&str, Key),
        class: Class,
        role: Role,
        requests_max: u32,
        tokens_max: Option<Tokens>,
        before: Option<&Self>,
    ) -> Self {
        let same =
            before.filter(|before| *before.name == *name && before.requests_max == requests_max);
        let fresh = || {
            Arc::new(Semaphore::new(
                usize::try_from(requests_max).unwrap_or(usize::MAX),
            ))
        };
        Self {
            name: name.into(),
            key,
            class,
            role,
            tokens_max,
            requests_max,
            places: same.map_or_else(fresh, |same| Arc::clone(&same.places)),
        }
    }

    /// A permit for one more request of this client.
    ///
    /// # Errors
    /// When its limit on requests in flight is reached.
    pub(super) fn place(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        let place = Arc::clone(&self.places).try_acquire_owned();
        place.map_err(|_full| {
            let what = format!("client `{}`, by its requests in flight,", self.name);
            at_limit("take the request", what, self.requests_max)
        })
    }
}

impl PartialEq for Client {
    fn eq(&self, other: &Self) -> bool {
        (
            &self.name,
            &self.key,
            self.class,
            self.role,
            self.tokens_max,
            self.requests_max,
        ) == (
            &other.name,
            &other.key,
            other.class,
            other.role,
            other.tokens_max,
            other.requests_max,
        )
    }
}

impl Eq for Client {}

impl Access {
    /// The client of a request; `None` if every client is served.
    ///
    /// # Errors
    /// 401 without a key or with an unknown one, except for keyless endpoints.
    pub(super) fn client_of(
        &self,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<Client>>, Fault> {
        let Some(clients) = &self.clients else {
            return Ok(None);
        };
        let page = matches!(path, "/" | "/status.json" | "/history.json");
        let by_password = if page { key_as_password(headers) } else { None };
        let sent = key_in(headers).or(by_password.as_deref());
        // Compares all keys, so that the time does not reveal the position of a match.
        let known = sent.and_then(|sent| {
            let mut found = None;
            for client in clients {
                if client.key.is(sent) {
                    found = Some(Arc::clone(client));
                }
            }
            found
        });
        let keyless = match path {
            "/health" => self.keyless.health,
            "/metrics" => self.keyless.metrics,
            _ => false,
        };
        match known {
            Some(client) => Ok(Some(client)),
            None if keyless => Ok(None),
            None => {
                let (what, hint) = if sent.is_some() {
                    ("unknown API key", "use a key of `http.keys_file`")
                } else {
                    (
                        "missing API key",
                        "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                    )
                };
                let message = format!("cannot serve `{}`: {what} (hint: {hint})", shortened(path));
                Err(Fault::request(
                    StatusCode::UNAUTHORIZED,
                    "invalid_api_key",
                    message,
                ))
            }
        }
    }
}

/// The password of Basic authentication, by which a browser sends the key for the page. Only the page accepts it,
/// because a browser also attaches it to requests from pages of other sites.
fn key_as_password(headers: &HeaderMap) -> Option<Vec<u8>> {
    let (scheme, encoded) = headers
        .get(header::AUTHORIZATION)?
        .as_bytes()
        .split_at_checked(BASIC.len())?;
    let pair = BASE64.decode(encoded.trim_ascii()).ok()?;
    let name = pair.iter().position(|byte| *byte == b':')?;
    scheme
        .eq_ignore_ascii_case(BASIC)
        .then(|| pair.into_iter().skip(name + 1).collect())
}

fn key_in(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .map(HeaderValue::as_bytes);
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_at_checked(BEARER.len())?;
        scheme
            .eq_ignore_ascii_case(BEARER)
            .then(|| key.trim_ascii())
    });
    bearer
        .or_else(|| headers.get(API_KEY).map(HeaderValue::as_bytes))
        .or_else(|| {
            let protocols = headers.get(header::SEC_WEBSOCKET_PROTOCOL)?.as_bytes();
            let mut protocols = protocols
                .split(|byte| *byte == b',')
                .map(<[u8]>::trim_ascii);
            protocols.find_map(|protocol| protocol.strip_prefix(PROTOCOL_KEY))
        })
}

const BASIC: &[u8] = b"Basic ";
const BEARER: &[u8] = b"Bearer ";
/// Header of Anthropic's clients.
const API_KEY: &str = "x-api-key";
/// Subprotocol with the key: browsers cannot set other headers of a WebSocket.
const PROTOCOL_KEY: &[u8] = b"openai-insecure-api-key.";

#[cfg(test)]
mod tests {
    use super::*;

    fn access(keyless: Keyless) -> Access {
        let client = |name, key: &str| {
            Arc::new(Client::new(
                (name, Key::new(key.to_owned())),
                Class::Batch,
                Role::Viewer,
                1,
                None,
                None,
            ))
        };
        Access {
            clients: Some(vec![
                client("kitchen", "key-of-kitchen-1"),
                client("study", "key-of-study-123"),
            ]),
            keyless,
            ..Access::default()
        }
    }

    fn asked(
        access: &Access,
        path: &str,
        headers: &[(&'static str, &'static str)],
    ) -> Result<Option<String>, String> {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
        match access.client_of(path, &headers.collect()) {
            Ok(client) => Ok(client.map(|client| client.name.to_string())),
            Err(fault) => Err(format!("{} {}", fault.status().as_u16(), fault.code())),
        }
    }

    #[test]
    fn a_key_is_read_as_openai_and_as_anthropic_send_it() {
        let access = access(Keyless::default());
        let ask = |headers: &[(&'static str, &'static str)]| asked(&access, "/v1/models", headers);
        assert_eq!(
            ask(&[("authorization", "Bearer key-of-study-123")]),
            Ok(Some("study".to_owned()))
        );
        assert_eq!(
            ask(&[("authorization", "bearer  key-of-study-123")]),
            Ok(Some("study".to_owned()))
        );
        assert_eq!(
            ask(&[("x-api-key", "key-of-kitchen-1")]),
            Ok(Some("kitchen".to_owned()))
        );
        assert_eq!(
            ask(&[(
                "sec-websocket-protocol",
                "realtime, openai-insecure-api-key.key-of-study-123"
            )]),
            Ok(Some("study".to_owned()))
        );
        for headers in [
            &[][..],
            &[("authorization", "Basic key-of-study-123")],
            &[("authorization", "Bearer")],
            &[("x-api-key", "")],
            &[("x-api-key", "key-of-kitchen-")],
            &[("x-api-key", "key-of-kitchen-12")],
            &[("x-api-key", "key-of-kitchen-2")],
        ] {
            assert_eq!(
                ask(headers),
                Err("401 invalid_api_key".to_owned()),
                "{headers:?}"
            );
        }
        assert_eq!(
            asked(&Access::default(), "/v1/models", &[]),
            Ok(None),
            "every client is served"
        );
    }

    #[test]
    fn a_browser_sends_the_key_of_the_page_as_a_password_and_of_nothing_else() {
        let access = access(Keyless::default());
        let password = ("authorization", "Basic bWU6a2V5LW9mLXN0dWR5LTEyMw==");
        for path in ["/", "/status.json", "/history.json"] {
            assert_eq!(
                asked(&access, path, &[password]),
                Ok(Some("study".to_owned())),
                "{path}"
            );
        }
        for (path, header) in [
            ("/v1/models", password),
            ("/", ("authorization", "Basic bWU6a2V5LW9mLXN0dWR5LTEyNA==")),
            ("/", ("authorization", "Basic a2V5LW9mLXN0dWR5LTEyMw==")),
            ("/", ("authorization", "Basic !")),
        ] {
            assert_eq!(
                asked(&access, path, &[header]),
                Err("401 invalid_api_key".to_owned()),
                "{path} {header:?}"
            );
        }
    }

    #[test]
    fn health_and_metrics_need_a_key_unless_the_setting_says_otherwise() {
        for (health, metrics) in [(false, false), (true, false), (false, true)] {
            let access = access(Keyless { health, metrics });
            assert_eq!(asked(&access, "/health", &[]).is_ok(), health);
            assert_eq!(asked(&access, "/metrics", &[]).is_ok(), metrics);
            assert!(asked(&access, "/v1/models", &[]).is_err());
        }
    }

    #[test]
    fn a_client_keeps_what_it_has_in_flight_when_its_settings_are_read_again() {
        let new = |limit, before| {
            Client::new(
                ("a", Key::new("k".repeat(16))),
                Class::Batch,
                Role::Viewer,
                limit,
                None,
                before,
            )
        };
        let first = new(1, None);
        let _held = first.place().unwrap();
        assert!(first.place().is_err());
        assert!(new(1, Some(&first)).place().is_err());
        assert!(
            new(2, Some(&first)).place().is_ok(),
            "another limit counts again"
        );
    }

    #[test]
    fn a_key_is_not_shown() {
        let shown = format!("{:?}", access(Keyless::default()));
        assert!(!shown.contains("key-of"), "{shown}");
    }
}
