//! Double of an API server, with the part of the scheduler that allocates consumable capacity.
//!
//! Objects, statuses and the rules of validation are those that a server of version 1.36 showed.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
};

use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::broadcast,
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig};
use tokio_stream::{StreamExt as _, wrappers::BroadcastStream};

pub(super) const DRIVER: &str = "memory.cotenant.dev";
pub(super) const NODE: &str = "orin-1";
const STEP: u64 = 64 << 20;

/// Objects of the server.
#[derive(Default)]
struct State {
    slices: BTreeMap<String, Value>,
    claims: BTreeMap<(String, String), Value>,
    /// Status of every answer instead of the right one, as with an expired token.
    refuses: Option<u16>,
    away: bool,
    version: u64,
}

/// The server; ends with the test.
#[derive(Clone)]
pub(super) struct ApiServer {
    state: Arc<Mutex<State>>,
    watchers: broadcast::Sender<Value>,
    pub(super) address: SocketAddr,
}

/// Reason why a claim is not allocated.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unscheduled {
    NoSlice,
    Tainted,
    Capacity,
}

impl ApiServer {
    pub(super) async fn start() -> Self {
        Self::start_with(None).await
    }

    /// Starts a server with TLS.
    pub(super) async fn start_with(tls: Option<ServerConfig>) -> Self {
        let tls = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            state: Arc::default(),
            watchers: broadcast::Sender::new(1024),
            address: listener.local_addr().unwrap(),
        };
        let accepting = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = accepting.clone();
                if server.lock().away {
                    continue;
                }
                let tls = tls.clone();
                tokio::spawn(async move {
                    match tls {
                        None => server.serve(stream).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => server.serve(stream).await,
                            Err(_refused) => {}
                        },
                    }
                });
            }
        });
        server
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let answer = service_fn(move |request| self.clone().answer(request));
        let connection = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), answer);
        let _ended = connection.await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Answers nothing more, until `false`.
    pub(super) fn set_away(&self, away: bool) {
        self.lock().away = away;
    }

    /// Answers every request with this status.
    pub(super) fn refuse(&self, status: Option<u16>) {
        self.lock().refuses = status;
    }

    /// Returns the device of the slice, if it is published.
    pub(super) fn device(&self) -> Option<Value> {
        let state = self.lock();
        let slice = state.slices.values().next()?;
        Some(slice["spec"]["devices"][0].clone())
    }

    pub(super) fn capacity_mib(&self) -> Option<u64> {
        let device = self.device()?;
        let text = device["capacity"]["memory"]["value"]
            .as_str()
            .unwrap()
            .to_owned();
        Some(bytes(&text) >> 20)
    }

    /// Returns key, value and effect of each taint.
    pub(super) fn taints(&self) -> Vec<String> {
        let device = self.device().unwrap_or_default();
        let taints = device["taints"].as_array().cloned().unwrap_or_default();
        let part = |taint: &Value, name: &str| taint[name].as_str().unwrap().to_owned();
        taints
            .iter()
            .map(|taint| {
                format!(
                    "{}={}:{}",
                    part(taint, "key"),
                    part(taint, "value"),
                    part(taint, "effect")
                )
            })
            .collect()
    }

    /// Deletes all slices, as an administrator does by hand, and kubelet 30 s after it has lost the plugin.
    pub(super) fn wipe(&self) {
        let gone = std::mem::take(&mut self.lock().slices);
        for object in gone.into_values() {
            let _none = self
                .watchers
                .send(json!({ "type": "DELETED", "object": object }));
        }
    }

    /// Stores an object as it is.
    pub(super) fn put_claim(&self, claim: Value) {
        let key = |name: &str| claim["metadata"][name].as_str().unwrap().to_owned();
        let key = (key("namespace"), key("name"));
        self.lock().claims.insert(key, claim);
    }

    pub(super) fn delete_claim(&self, name: &str) {
        self.lock()
            .claims
            .remove(&("default".to_owned(), name.to_owned()));
    }

    /// Allocates a claim for a pod as the scheduler does: rounded up to the step, on a device without such a taint that
    /// has the capacity.
    pub(super) fn schedule(
        &self,
        uid: &str,
        pod: &str,
        asked_mib: u64,
        parameters: Option<Value>,
    ) -> Result<(), Unscheduled> {
        let device = self.device().ok_or(Unscheduled::NoSlice)?;
        let taints = device["taints"].as_array().cloned().unwrap_or_default();
        if taints.iter().any(|taint| taint["effect"] != "None") {
            return Err(Unscheduled::Tainted);
        }
        let asked = (asked_mib << 20).next_multiple_of(STEP);
        let taken: u64 = self.lock().claims.values().map(consumed).sum();
        let capacity = bytes(device["capacity"]["memory"]["value"].as_str().unwrap());
        if taken + asked > capacity {
            return Err(Unscheduled::Capacity);
        }
        self.put_claim(claim(uid, &[pod], asked >> 20, parameters));
        Ok(())
    }

    async fn answer(
        self,
        request: Request<Incoming>,
    ) -> Result<Response<BoxBody<Bytes, Infallible>>, std::io::Error> {
        let (parts, body) = request.into_parts();
        let body = body
            .collect()
            .await
            .map_err(std::io::Error::other)?
            .to_bytes();
        let (method, path) = (parts.method.clone(), parts.uri.path().to_owned());
        let query = parts.uri.query().unwrap_or_default().to_owned();
        if self.lock().away {
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        assert_eq!(parts.headers["authorization"], "Bearer secret");
        if let Some(code) = self.lock().refuses {
            return Ok(whole(failure(code, "Unauthorized", "Unauthorized")));
        }
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let slices = ["apis", "resource.k8s.io", "v1", "resourceslices"];
        let is_slices = parts.len() >= 4 && parts[..4] == slices;
        let name = parts.last().copied().unwrap_or_default();
        let answer = match parts.as_slice() {
            ["api", "v1", "nodes", node] => (
                200,
                json!({ "metadata": { "name": node, "uid": "node-uid" } }),
            ),
            [
                "apis",
                "resource.k8s.io",
                "v1",
                "namespaces",
                namespace,
                "resourceclaims",
                name,
            ] => {
                let key = ((*namespace).to_owned(), (*name).to_owned());
                let absent = failure(
                    404,
                    "NotFound",
                    &format!("resourceclaims \"{name}\" not found"),
                );
                self.lock()
                    .claims
                    .get(&key)
                    .map_or(absent, |claim| (200, claim.clone()))
            }
            _ if is_slices && query.contains("watch=true") => return Ok(self.watch()),
            _ if is_slices && parts.len() == 4 => {
                let items: Vec<Value> = self.lock().slices.values().cloned().collect();
                (200, json!({ "kind": "ResourceSliceList", "items": items }))
            }
            _ if is_slices && method == Method::PATCH => {
                assert_eq!(query, "fieldManager=cotenant-dra&force=true");
                self.apply(name, &body)
            }
            _ if is_slices => {
                let gone = self.lock().slices.remove(name);
                gone.map_or(failure(404, "NotFound", "not found"), |object| {
                    (200, object)
                })
            }
            _ => failure(
                404,
                "NotFound",
                &format!("the server could not find {path}"),
            ),
        };
        Ok(whole(answer))
    }

    /// Server-side apply of a slice by its only writer.
    fn apply(&self, name: &str, body: &[u8]) -> (u16, Value) {
        let mut object: Value = serde_json::from_slice(body).unwrap();
        if let Some(message) = fault(&object) {
            let message = format!("ResourceSlice.resource.k8s.io \"{name}\" is invalid: {message}");
            return failure(422, "Invalid", &message);
        }
        let mut state = self.lock();
        state.version += 1;
        let known = state.slices.contains_key(name);
        let kind = if known { "MODIFIED" } else { "ADDED" };
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        state.slices.insert(name.to_owned(), object.clone());
        drop(state);
        let _none = self
            .watchers
            .send(json!({ "type": kind, "object": object }));
        (if known { 200 } else { 201 }, object)
    }

    fn watch(&self) -> Response<BoxBody<Bytes, Infallible>> {
        let changes = BroadcastStream::new(self.watchers.subscribe());
        let lines = changes
            .filter_map(Result::ok)
            .map(|change| Ok::<_, Infallible>(Frame::data(Bytes::from(format!("{change}\n")))));
        Response::new(BodyExt::boxed(StreamBody::new(lines)))
    }
}

/// Returns a claim that is allocated on this node.
pub(super) fn claim(uid: &str, pods: &[&str], mib: u64, parameters: Option<Value>) -> Value {
    let config = parameters.map(|parameters| {
        json!({ "source": "FromClaim", "requests": [], "opaque": { "driver": DRIVER, "parameters": parameters } })
    });
    let reserved: Vec<Value> = pods
        .iter()
        .map(|pod| json!({ "resource": "pods", "name": pod, "uid": pod }))
        .collect();
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "namespace": "default", "name": uid, "uid": uid },
        "spec": { "devices": { "requests": [{
            "name": "memory",
            "exactly": { "deviceClassName": DRIVER, "capacity": { "requests": { "memory": format!("{mib}Mi") } } },
        }] } },
        "status": {
            "allocation": { "devices": {
                "results": [{
                    "request": "memory", "driver": DRIVER, "pool": NODE, "device": "pool",
                    "shareID": format!("share-{uid}"), "consumedCapacity": { "memory": format!("{mib}Mi") },
                }],
                "config": Vec::from_iter(config),
            } },
            "reservedFor": reserved,
        },
    })
}

/// Returns the first fault that the real server finds in a slice.
fn fault(slice: &Value) -> Option<String> {
    let device = &slice["spec"]["devices"][0];
    let memory = &device["capacity"]["memory"];
    let policy = &memory["requestPolicy"];
    let at = "spec.devices[0].capacity[memory].requestPolicy";
    if device["allowMultipleAllocations"] != true && !policy.is_null() {
        return Some(format!(
            "{at}: Forbidden: allowMultipleAllocations must be true"
        ));
    }
    let of = |value: &Value| bytes(value.as_str().unwrap_or("0"));
    let (value, least) = (of(&memory["value"]), of(&policy["validRange"]["min"]));
    if least > value || of(&policy["default"]) > value {
        return Some(format!(
            "{at}.validRange.min: Invalid value: larger than the capacity"
        ));
    }
    let taints = device["taints"].as_array().into_iter().flatten();
    let effects = ["None", "NoSchedule", "NoExecute"];
    let unknown = |taint: &&Value| !effects.contains(&taint["effect"].as_str().unwrap_or_default());
    let mut unknown = taints.filter(unknown);
    unknown.next().map(|taint| {
        format!(
            "spec.devices[0].taints: Unsupported value: {}",
            taint["effect"]
        )
    })
}

fn consumed(claim: &Value) -> u64 {
    let results = claim["status"]["allocation"]["devices"]["results"].as_array();
    let ours = results.into_iter().flatten();
    ours.map(|result| bytes(result["consumedCapacity"]["memory"].as_str().unwrap_or("0")))
        .sum()
}

fn bytes(quantity: &str) -> u64 {
    match quantity.strip_suffix("Mi") {
        Some(mib) => mib.parse::<u64>().unwrap() << 20,
        None => quantity.parse().unwrap(),
    }
}

fn failure(code: u16, reason: &str, message: &str) -> (u16, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code,
    });
    (code, status)
}

fn whole((code, object): (u16, Value)) -> Response<BoxBody<Bytes, Infallible>> {
    let body = http_body_util::Full::new(Bytes::from(object.to_string()));
    let mut response = Response::new(BodyExt::boxed(body));
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}
