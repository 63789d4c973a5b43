//! JSON client of the API server: get, apply, watch and delete, over HTTP/1.1 and TLS.

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, Response, StatusCode, Uri,
    body::{Bytes, Incoming},
    client::conn::http1::{self, SendRequest},
    header,
};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::kubeconfig::{Access, AccessError};
use cotenant_units::lock::locked;

/// Client that keeps one idle connection.
#[derive(Debug)]
pub struct Client {
    access: Access,
    idle: Mutex<Option<SendRequest<Full<Bytes>>>>,
}

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    /// The server is not reached.
    #[error("cannot reach the API server at `{server}`")]
    Unreachable {
        /// Its address.
        server: Uri,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// It does not answer.
    #[error("no answer from the API server at `{server}` within {} s", CALL_MAX.as_secs())]
    Late {
        /// Its address.
        server: Uri,
    },
    /// The credentials cannot be read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// It refuses.
    #[error("the API server refuses {act}: {code} {reason}: {message}{}", remedy(*code))]
    Refused {
        /// Verb and path.
        act: String,
        /// Status code.
        code: u16,
        /// `reason` of the status object.
        reason: String,
        /// `message` of the status object.
        message: String,
    },
    /// Its answer is not JSON.
    #[error("cannot read the answer of the API server to {act}")]
    Malformed {
        /// Verb and path.
        act: String,
        /// Cause.
        #[source]
        source: serde_json::Error,
    },
}

impl KubeError {
    /// Returns whether the object does not exist.
    #[must_use]
    pub const fn is_absent(&self) -> bool {
        matches!(self, Self::Refused { code: 404, .. })
    }
}

fn remedy(code: u16) -> &'static str {
    match code {
        401 => {
            " (the token or certificate is expired or unknown: it is read again with each attempt; check also that \
             the clocks of both machines agree)"
        }
        403 => " (the account lacks a right: see deploy/kubernetes/cotenant-dra.yaml)",
        _ => "",
    }
}

impl Client {
    /// Uses this access; connects with the first call.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self {
            access,
            idle: Mutex::default(),
        }
    }

    /// Reads an object.
    ///
    /// # Errors
    /// If the server is not reached, or refuses.
    pub async fn get(&self, path: &str) -> Result<Value, KubeError> {
        self.call(Method::GET, path, None).await
    }

    /// Writes the fields of an object by server-side apply; other fields stay.
    ///
    /// # Errors
    /// As for [`get`](Self::get).
    pub async fn apply(&self, path: &str, object: &Value) -> Result<Value, KubeError> {
        let path = format!("{path}?fieldManager={MANAGER}&force=true");
        self.call(Method::PATCH, &path, Some(object)).await
    }

    /// Deletes an object, which may be gone.
    ///
    /// # Errors
    /// As for [`get`](Self::get).
    pub async fn delete(&self, path: &str) -> Result<(), KubeError> {
        match self.call(Method::DELETE, path, None).await {
            Err(error) if !error.is_absent() => Err(error),
            _ => Ok(()),
        }
    }

    /// Opens a watch on a connection of its own.
    ///
    /// # Errors
    /// As for [`get`](Self::get).
    pub async fn watch(&self, path: &str) -> Result<Watch, KubeError> {
        let mut sender = self.within(self.connect()).await?;
        let request = self.request(Method::GET, path, None)?;
        let response = self
            .within(async { sender.send_request(request).await.map_err(io::Error::other) })
            .await?;
        let act = act(&Method::GET, path);
        if response.status().is_success() {
            return Ok(Watch {
                body: response.into_body(),
                read: Vec::new(),
                act,
                _sender: sender,
            });
        }
        let (status, body) = self.collect(response).await?;
        Err(refusal(act, status, &body))
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        object: Option<&Value>,
    ) -> Result<Value, KubeError> {
        let act = act(&method, path);
        let kept = locked(&self.idle).take();
        let kept = kept.filter(|sender| !sender.is_closed());
        let mut is_new = kept.is_none();
        let mut sender = match kept {
            Some(sender) => sender,
            None => self.within(self.connect()).await?,
        };
        let (status, body) = loop {
            let request = self.request(method.clone(), path, object)?;
            let sent = self
                .within(async {
                    sender.ready().await.map_err(io::Error::other)?;
                    sender.send_request(request).await.map_err(io::Error::other)
                })
                .await;
            match sent {
                Ok(response) => break self.collect(response).await?,
                // The server may have closed the idle connection; all four verbs may be repeated.
                Err(KubeError::Unreachable { .. }) if !is_new => {
                    is_new = true;
                    sender = self.within(self.connect()).await?;
                }
                Err(error) => return Err(error),
            }
        };
        // After 401 the certificate is read again with the next connection.
        if status != StatusCode::UNAUTHORIZED {
            *locked(&self.idle) = Some(sender);
        }
        if !status.is_success() {
            return Err(refusal(act, status, &body));
        }
        serde_json::from_slice(&body).map_err(|source| KubeError::Malformed { act, source })
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        object: Option<&Value>,
    ) -> Result<Request<Full<Bytes>>, KubeError> {
        let server = &self.access.server;
        let authority = server.authority().map(ToString::to_string);
        let prefix = server.path().trim_end_matches('/');
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{prefix}{path}"))
            .header(header::HOST, authority.unwrap_or_default())
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, MANAGER);
        if let Some(token) = &self.access.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.read()?));
        }
        if object.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/apply-patch+yaml");
        }
        let body = object.map(ToString::to_string).unwrap_or_default();
        request
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| self.unreachable(io::Error::other(error)))
    }

    async fn connect(&self) -> io::Result<SendRequest<Full<Bytes>>> {
        let server = &self.access.server;
        let host = server.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let secure = server.scheme_str() == Some("https");
        let port = server.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        if !secure {
            return open(stream).await;
        }
        let tls = TlsConnector::from(Arc::new(self.tls().map_err(io::Error::other)?));
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        open(tls.connect(name, stream).await?).await
    }

    /// Reads roots and certificates, which kubelet renews.
    fn tls(&self) -> Result<ClientConfig, TlsError> {
        let mut roots = RootCertStore::empty();
        if let Some(pem) = &self.access.roots {
            for root in CertificateDer::pem_slice_iter(&pem.read()?) {
                roots.add(root?)?;
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let Some((certificate, key)) = &self.access.identity else {
            return Ok(builder.with_no_client_auth());
        };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(&certificate.read()?).collect();
        let key = PrivateKeyDer::from_pem_slice(&key.read()?)?;
        Ok(builder.with_client_auth_cert(chain?, key)?)
    }

    async fn collect(
        &self,
        response: Response<Incoming>,
    ) -> Result<(StatusCode, Bytes), KubeError> {
        let status = response.status();
        let body = http_body_util::Limited::new(response.into_body(), ANSWER_MAX);
        let body = self
            .within(async { body.collect().await.map_err(io::Error::other) })
            .await?;
        Ok((status, body.to_bytes()))
    }

    async fn within<T>(&self, call: impl Future<Output = io::Result<T>>) -> Result<T, KubeError> {
        match timeout(CALL_MAX, call).await {
            Ok(result) => result.map_err(|source| self.unreachable(source)),
            Err(_) => Err(KubeError::Late {
                server: self.access.server.clone(),
            }),
        }
    }

    fn unreachable(&self, source: io::Error) -> KubeError {
        KubeError::Unreachable {
            server: self.access.server.clone(),
            source,
        }
    }
}

/// Stream of changes.
#[derive(Debug)]
pub struct Watch {
    body: Incoming,
    read: Vec<u8>,
    act: String,
    /// The connection ends with it.
    _sender: SendRequest<Full<Bytes>>,
}

impl Watch {
    /// Returns the next change, `{type, object}`; `None` at the end, which the server sets after minutes.
    ///
    /// # Errors
    /// If it is not JSON.
    pub async fn next(&mut self) -> Result<Option<Value>, KubeError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let act = self.act.clone();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|source| KubeError::Malformed { act, source });
            }
            match self.body.frame().await {
                Some(Ok(frame)) if self.read.len() <= ANSWER_MAX => {
                    if let Ok(data) = frame.into_data() {
                        self.read.extend_from_slice(&data);
                    }
                }
                _ => return Ok(None),
            }
        }
    }
}

async fn open<S>(stream: S) -> io::Result<SendRequest<Full<Bytes>>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    tokio::spawn(async move {
        // Its error is that of the call.
        let _ended = connection.await;
    });
    Ok(sender)
}

fn act(method: &Method, path: &str) -> String {
    let path = path.split('?').next().unwrap_or_default();
    format!("{method} {path}")
}

fn refusal(act: String, status: StatusCode, body: &[u8]) -> KubeError {
    let object: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |name: &str| {
        let text = object.get(name).and_then(Value::as_str);
        text.unwrap_or_default().chars().take(MESSAGE_MAX).collect()
    };
    KubeError::Refused {
        act,
        code: status.as_u16(),
        reason: text("reason"),
        message: text("message"),
    }
}

/// Certificates cannot be used.
#[derive(Debug, thiserror::Error)]
enum TlsError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("a certificate or key is not PEM")]
    Pem(#[from] rustls::pki_types::pem::Error),
    #[error("a certificate or key cannot be used")]
    Tls(#[from] rustls::Error),
}

/// Name of this writer in the API.
pub const MANAGER: &str = "cotenant-dra";

/// Longest call. Our choice: kubelet waits 45 s for a preparation, of which memory may take 30.
const CALL_MAX: Duration = Duration::from_secs(8);

/// Longest answer: an object of the API has at most 1.5 MiB, and a list is of one node.
const ANSWER_MAX: usize = 4 << 20;

/// Characters of the server's message in ours.
const MESSAGE_MAX: usize = 600;
