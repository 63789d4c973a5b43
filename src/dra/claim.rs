//! A ResourceClaim as booking: pod, bytes, class and the devices of the answer.

use serde::Deserialize;
use serde_json::Value;

use super::quantity;
use cotenant_rpc::v1::LeaseClass;
use cotenant_units::Bytes;

/// Name of the only device of a node.
pub const DEVICE: &str = "pool";

/// Name of its capacity.
pub const MEMORY: &str = "memory";

/// Whose claims are prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Name of the driver.
    pub driver: String,
    /// Name of the node, which is also that of the pool.
    pub node: String,
    /// Class for which the pool is published, and class of claims without parameters.
    pub class: LeaseClass,
}

/// A claim as kubelet names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its `metadata.uid`.
    pub uid: String,
}

/// Part of the device for one request of the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Name of the request.
    pub request: String,
    /// Identifies the part, as in the claim.
    pub share_id: Option<String>,
}

/// Memory to book for the pod of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Booking {
    /// The claim.
    pub claim: ClaimName,
    /// Uid of the pod that uses it.
    pub pod: String,
    /// Urgency.
    pub class: LeaseClass,
    /// Memory that Kubernetes has given to it.
    pub min: Bytes,
    /// Memory up to which the supervisor may give more; at least `min`.
    pub max: Bytes,
    /// Parts of the device.
    pub shares: Vec<Share>,
}

/// Reason why a claim cannot be prepared as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// Its uid can name no lease.
    #[error("claim uid `{0}` is not 1 to 57 letters, digits and `-`")]
    Uid(String),
    /// It was deleted and created again.
    #[error("has uid `{found}`, and kubelet asks for `{asked}`: the claim was replaced")]
    Replaced {
        /// Uid of the present claim.
        found: String,
        /// Uid that kubelet names.
        asked: String,
    },
    /// The object is no claim of version 1.
    #[error("is no ResourceClaim of resource.k8s.io/v1: {0}")]
    Malformed(String),
    /// It has no allocation.
    #[error("is not allocated")]
    NotAllocated,
    /// Its allocation is of other drivers or nodes.
    #[error(
        "has no device `{DEVICE}` of driver `{driver}` in pool `{node}`: it is allocated to {found}"
    )]
    NotOurs {
        /// Our driver.
        driver: String,
        /// Our node.
        node: String,
        /// What it is allocated to.
        found: String,
    },
    /// An allocation without bytes.
    #[error(
        "request `{request}` has no consumed capacity `{MEMORY}`: the cluster needs the feature gate DRAConsumableCapacity"
    )]
    NoCapacity {
        /// The request.
        request: String,
    },
    /// A size that cannot be used.
    #[error("request `{request}`: `{value}` is not a positive quantity of bytes")]
    Size {
        /// The request.
        request: String,
        /// Its consumed capacity.
        value: String,
    },
    /// No pod, or no pods alone, use it.
    #[error("is reserved for no pod")]
    NoPod,
    /// Several pods use it.
    #[error(
        "is reserved for {0} pods, and the memory of a claim belongs to the control group of one: give each pod a claim by a ResourceClaimTemplate"
    )]
    SeveralPods(usize),
    /// Parameters that are not understood.
    #[error("parameters of driver `{driver}` cannot be used: {problem}")]
    Parameters {
        /// Our driver.
        driver: String,
        /// The fault.
        problem: String,
    },
    /// A class without a guarantee.
    #[error(
        "class `{class}` is less urgent than `{published}`, for which the pool is published, so that its capacity is not certain: use `{published}`, or start cotenant-dra with `--class {class}`"
    )]
    LessUrgent {
        /// Class of the claim.
        class: &'static str,
        /// Class of the pool.
        published: &'static str,
    },
}

/// Opaque parameters of a claim or DeviceClass.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Parameters {
    class: Option<String>,
    max: Option<String>,
    /// Ignored, as are those of other drivers' parameters.
    #[serde(rename = "apiVersion")]
    _api_version: Option<String>,
    #[serde(rename = "kind")]
    _kind: Option<String>,
}

impl Booking {
    /// Reads a claim that kubelet wants prepared.
    ///
    /// # Errors
    /// If it is not the named one, not ours, or asks for what cannot be given.
    pub fn read(claim: &Value, asked: &ClaimName, own: &Identity) -> Result<Self, ClaimError> {
        let found = text(claim, "/metadata/uid");
        if found != asked.uid {
            return Err(ClaimError::Replaced {
                found: found.to_owned(),
                asked: asked.uid.clone(),
            });
        }
        lease_name(&asked.uid)?;
        let allocation = claim
            .pointer("/status/allocation")
            .filter(|allocation| !allocation.is_null())
            .ok_or(ClaimError::NotAllocated)?;
        let results = list(allocation, "/devices/results")?;
        let ours = |result: &&Value| {
            text(result, "/driver") == own.driver
                && text(result, "/pool") == own.node
                && text(result, "/device") == DEVICE
        };
        let mut min = Bytes::ZERO;
        let mut shares = Vec::new();
        for result in results.iter().filter(ours) {
            let request = text(result, "/request").to_owned();
            let share = string(result, "/shareID");
            min = min
                .checked_add(size_of(result, &request)?)
                .unwrap_or(Bytes::new(u64::MAX));
            shares.push(Share {
                request,
                share_id: share.map(str::to_owned),
            });
        }
        if shares.is_empty() {
            return Err(ClaimError::NotOurs {
                driver: own.driver.clone(),
                node: own.node.clone(),
                found: elsewhere(results),
            });
        }
        let parameters = parameters(allocation, own, &shares)?;
        let class = class_of(&parameters, own)?;
        Ok(Self {
            claim: asked.clone(),
            pod: pod_of(claim)?,
            class,
            min,
            max: max_of(&parameters, min, own)?,
            shares,
        })
    }
}

/// Returns the name under which the lease of a claim is held; it carries the claim's uid across all restarts.
///
/// # Errors
/// If the uid does not fit into a name.
pub fn lease_name(uid: &str) -> Result<String, ClaimError> {
    let fits = (1..=UID_MAX).contains(&uid.len())
        && uid.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if fits {
        Ok(format!("{LEASE_PREFIX}{uid}"))
    } else {
        Err(ClaimError::Uid(uid.chars().take(UID_MAX).collect()))
    }
}

/// Returns the claim's uid in the name of a lease; `None` for a lease of another holder.
#[must_use]
pub fn uid_of(tenant: &str) -> Option<&str> {
    tenant.strip_prefix(LEASE_PREFIX)
}

/// Returns the class of this name.
#[must_use]
pub fn class_named(name: &str) -> Option<LeaseClass> {
    CLASSES
        .into_iter()
        .find(|(_, known)| *known == name)
        .map(|(class, _)| class)
}

/// Returns the name of a class.
#[must_use]
pub fn name_of(class: LeaseClass) -> &'static str {
    let known = CLASSES.into_iter().find(|(known, _)| *known == class);
    known.map_or("unspecified", |(_, name)| name)
}

/// Returns the string at a pointer into an object.
pub(crate) fn string<'object>(object: &'object Value, pointer: &str) -> Option<&'object str> {
    object.pointer(pointer)?.as_str()
}

fn text<'claim>(claim: &'claim Value, pointer: &str) -> &'claim str {
    string(claim, pointer).unwrap_or_default()
}

/// Returns a list that may be absent.
fn list<'claim>(value: &'claim Value, pointer: &str) -> Result<&'claim [Value], ClaimError> {
    match value.pointer(pointer) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(_) => Err(ClaimError::Malformed(format!("`{pointer}` is not a list"))),
    }
}

fn elsewhere(results: &[Value]) -> String {
    let found: Vec<String> = results
        .iter()
        .map(|result| {
            let part = |name| text(result, name);
            format!(
                "`{}/{}/{}`",
                part("/driver"),
                part("/pool"),
                part("/device")
            )
        })
        .collect();
    if found.is_empty() {
        "nothing".to_owned()
    } else {
        found.join(", ")
    }
}

fn size_of(result: &Value, request: &str) -> Result<Bytes, ClaimError> {
    let value = string(result, "/consumedCapacity/memory");
    let value = value.ok_or_else(|| ClaimError::NoCapacity {
        request: request.to_owned(),
    })?;
    let bytes = quantity::parse(value).filter(|bytes| *bytes > 0);
    bytes.map(Bytes::new).ok_or_else(|| ClaimError::Size {
        request: request.to_owned(),
        value: value.chars().take(40).collect(),
    })
}

/// Merges the parameters for our shares: those of the class first, then those of the claim.
fn parameters(
    allocation: &Value,
    own: &Identity,
    shares: &[Share],
) -> Result<Parameters, ClaimError> {
    let mut merged = Parameters::default();
    for from_claim in [false, true] {
        for config in list(allocation, "/devices/config")? {
            let requests = list(config, "/requests")?;
            // A subrequest is named `request/subrequest`, and parameters may name the request alone.
            let concerns = requests.is_empty()
                || requests.iter().filter_map(Value::as_str).any(|named| {
                    shares.iter().any(|share| {
                        share.request == named || share.request.split('/').next() == Some(named)
                    })
                });
            if (text(config, "/source") == "FromClaim") != from_claim
                || text(config, "/opaque/driver") != own.driver
                || !concerns
            {
                continue;
            }
            let value = config
                .pointer("/opaque/parameters")
                .cloned()
                .unwrap_or_default();
            let given: Parameters =
                serde_json::from_value(value).map_err(|error| ClaimError::Parameters {
                    driver: own.driver.clone(),
                    problem: error.to_string(),
                })?;
            merged.class = given.class.or(merged.class);
            merged.max = given.max.or(merged.max);
        }
    }
    Ok(merged)
}

fn class_of(parameters: &Parameters, own: &Identity) -> Result<LeaseClass, ClaimError> {
    let Some(name) = &parameters.class else {
        return Ok(own.class);
    };
    let class = class_named(name).ok_or_else(|| ClaimError::Parameters {
        driver: own.driver.clone(),
        problem: format!(
            "class: `{}` is none of {}",
            name.chars().take(40).collect::<String>(),
            CLASSES.map(|(_, name)| name).join(", ")
        ),
    })?;
    // The numbers on the wire rise as the urgency falls.
    if i32::from(class) > i32::from(own.class) {
        return Err(ClaimError::LessUrgent {
            class: name_of(class),
            published: name_of(own.class),
        });
    }
    Ok(class)
}

fn max_of(parameters: &Parameters, min: Bytes, own: &Identity) -> Result<Bytes, ClaimError> {
    let Some(text) = &parameters.max else {
        return Ok(min);
    };
    let refused = |problem| ClaimError::Parameters {
        driver: own.driver.clone(),
        problem,
    };
    let shown: String = text.chars().take(40).collect();
    let max = quantity::parse(text)
        .map(Bytes::new)
        .ok_or_else(|| refused(format!("max: `{shown}` is not a quantity of bytes")))?;
    if max < min {
        return Err(refused(format!(
            "max: `{shown}` is below {min}, which the claim requests"
        )));
    }
    Ok(max)
}

fn pod_of(claim: &Value) -> Result<String, ClaimError> {
    let pods: Vec<&Value> = list(claim, "/status/reservedFor")?
        .iter()
        .filter(|user| text(user, "/resource") == "pods" && text(user, "/apiGroup").is_empty())
        .collect();
    match pods.as_slice() {
        [] => Err(ClaimError::NoPod),
        [pod] => Ok(text(pod, "/uid").to_owned()),
        pods => Err(ClaimError::SeveralPods(pods.len())),
    }
}

/// Classes, with their names in parameters and settings.
const CLASSES: [(LeaseClass, &str); 4] = [
    (LeaseClass::AudioRealtime, "audio-realtime"),
    (LeaseClass::Interactive, "interactive"),
    (LeaseClass::LlmElastic, "llm-elastic"),
    (LeaseClass::Batch, "batch"),
];

const LEASE_PREFIX: &str = "claim-";

/// The name of a holder has at most 63 bytes; a uid of Kubernetes has 36.
const UID_MAX: usize = 57;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use proptest::prelude::*;
    use serde_json::json;

    pub(crate) fn own() -> Identity {
        Identity {
            driver: "memory.cotenant.dev".to_owned(),
            node: "orin-1".to_owned(),
            class: LeaseClass::Interactive,
        }
    }

    fn name() -> ClaimName {
        ClaimName {
            namespace: "default".to_owned(),
            name: "vision".to_owned(),
            uid: "4e-1".to_owned(),
        }
    }

    /// A claim with two requests of ours and one of another driver, and parameters of its class and its own.
    fn claim() -> Value {
        let result = |request: &str, driver: &str, memory: &str| {
            json!({
                "request": request, "driver": driver, "pool": "orin-1", "device": "pool",
                "shareID": format!("s-{request}"), "consumedCapacity": { "memory": memory },
            })
        };
        let config = |source: &str, requests: &[&str], parameters: Value| {
            json!({
                "source": source, "requests": requests,
                "opaque": { "driver": "memory.cotenant.dev", "parameters": parameters },
            })
        };
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "namespace": "default", "name": "vision", "uid": "4e-1" },
            "spec": { "devices": {} },
            "status": {
                "allocation": { "devices": {
                    "results": [
                        result("a", "memory.cotenant.dev", "128Mi"),
                        result("b/large", "memory.cotenant.dev", "64Mi"),
                        result("c", "gpu.example", "1Gi"),
                    ],
                    "config": [
                        config("FromClaim", &["b"], json!({ "max": "1Gi" })),
                        config("FromClass", &[], json!({ "class": "audio-realtime", "max": "512Mi" })),
                        config("FromClaim", &["c"], json!({ "max": "9Gi" })),
                    ],
                } },
                "reservedFor": [{ "resource": "pods", "name": "p", "uid": "pod-1" }],
            },
        })
    }

    #[test]
    fn a_claim_has_the_types_of_kubernetes_and_its_own_parameters_win_over_those_of_the_class() {
        let object = claim();
        let read: ResourceClaim = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), object);
        let booking = Booking::read(&object, &name(), &own()).unwrap();
        assert_eq!(
            (booking.min, booking.max),
            (Bytes::from_mib(192), Bytes::from_gib(1))
        );
        assert_eq!(booking.class, LeaseClass::AudioRealtime);
        assert_eq!(booking.pod, "pod-1");
        let requests: Vec<&str> = booking.shares.iter().map(|share| &*share.request).collect();
        assert_eq!(requests, ["a", "b/large"]);
        assert_eq!(booking.shares[0].share_id.as_deref(), Some("s-a"));
        assert_eq!(uid_of(&lease_name("4e-1").unwrap()), Some("4e-1"));
    }

    #[test]
    fn an_allocation_of_another_node_or_none_is_refused() {
        let mut other = claim();
        other["status"]["allocation"] = Value::Null;
        let read = |object: &Value| Booking::read(object, &name(), &own()).unwrap_err();
        assert_eq!(read(&other), ClaimError::NotAllocated);
        let mut other = claim();
        for result in other["status"]["allocation"]["devices"]["results"]
            .as_array_mut()
            .unwrap()
        {
            result["pool"] = "orin-2".into();
        }
        assert!(matches!(read(&other), ClaimError::NotOurs { .. }));
        let mut other = claim();
        other["status"]["allocation"]["devices"]["results"] = "x".into();
        assert!(matches!(read(&other), ClaimError::Malformed(_)));
        for uid in ["", "a/b", &"x".repeat(58)] {
            assert!(lease_name(uid).is_err(), "{uid}");
        }
    }

    proptest! {
        #[test]
        fn reading_returns_for_any_value_at_any_place(place in 0usize..12, number in any::<i64>(), text in ".{0,8}") {
            let places = [
                "/metadata/uid", "/status", "/status/allocation", "/status/allocation/devices",
                "/status/allocation/devices/results", "/status/allocation/devices/results/0",
                "/status/allocation/devices/results/0/consumedCapacity/memory", "/status/allocation/devices/config",
                "/status/allocation/devices/config/0/opaque/parameters", "/status/allocation/devices/config/0/requests",
                "/status/reservedFor", "/status/reservedFor/0/uid",
            ];
            for value in [json!(number), json!(text), json!([number]), json!({ text.clone(): number }), Value::Null] {
                let mut object = claim();
                *object.pointer_mut(places[place]).unwrap() = value;
                let _ = Booking::read(&object, &name(), &own());
            }
        }
    }
}
