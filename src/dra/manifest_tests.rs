//! Manifests of deploy/kubernetes, read as Kubernetes reads them.

use std::{fs, path::Path};

use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    apps::v1::DaemonSet,
    core::v1::{Namespace, Pod, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding},
    resource::v1::{DeviceClass, ResourceClaimTemplate},
};
use serde::{Deserialize as _, Serialize, de::DeserializeOwned};
use serde_json::Value;

fn documents(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes");
    let text = fs::read_to_string(path.join(name)).unwrap();
    serde_yaml::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

/// Reads an object as its type, which has to know every field.
fn check<T: DeserializeOwned + Serialize>(document: &Value) {
    let read: T = serde_json::from_value(document.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), *document);
}

#[test]
fn manifests_have_the_fields_and_types_of_kubernetes_and_no_others() {
    let all = ["cotenant-dra.yaml", "example.yaml", "drain.yaml"];
    let mut seen = 0;
    for document in all.iter().flat_map(|name| documents(name)) {
        seen += 1;
        match document["kind"].as_str().unwrap() {
            "ClusterRole" => check::<ClusterRole>(&document),
            "ClusterRoleBinding" => check::<ClusterRoleBinding>(&document),
            "DaemonSet" => check::<DaemonSet>(&document),
            "DeviceClass" => check::<DeviceClass>(&document),
            "Namespace" => check::<Namespace>(&document),
            "Pod" => check::<Pod>(&document),
            "ResourceClaimTemplate" => check::<ResourceClaimTemplate>(&document),
            "ServiceAccount" => check::<ServiceAccount>(&document),
            "ValidatingAdmissionPolicy" => check::<ValidatingAdmissionPolicy>(&document),
            "ValidatingAdmissionPolicyBinding" => {
                check::<ValidatingAdmissionPolicyBinding>(&document);
            }
            // Not in the types of 1.36.
            "DeviceTaintRule" => assert_eq!(document["spec"]["taint"]["effect"], "NoExecute"),
            kind => unreachable!("{kind}"),
        }
    }
    assert_eq!(seen, 11);
}
