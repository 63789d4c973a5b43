//! `cotenant-dra`: driver and supervisor as processes, between doubles of kubelet and the API server.

mod api_server;
mod kubelet;

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use cotenant::{
    probe::{ProbeRoot, cgroup::Hierarchy},
    rpc::v1::{GetStatusResponse, Lease, LeaseState, PressureLevel},
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use serde_json::json;

use cotenant_dra::proto::health::HealthStatus;

use self::{
    api_server::{ApiServer, NODE, Unscheduled, claim},
    kubelet::Kubelet,
};
use super::{
    fleet::{Ca, openssl_is_there},
    installation::{Daemon, Installation, budget},
};
use crate::support::PATIENCE;

const MIB: u64 = 1 << 20;

/// A node: its installation of the supervisor, and the folders that the driver shares with kubelet and runtime.
struct Node {
    installation: Installation,
    api: ApiServer,
    groups: PathBuf,
    arguments: Vec<&'static str>,
}

/// A running driver; killed on drop.
struct Driver(Child);

impl Drop for Driver {
    fn drop(&mut self) {
        let _gone = (self.0.kill(), self.0.wait());
    }
}

/// Control group of a pod, removed on drop.
struct Pod(PathBuf);

impl Pod {
    fn remove(&self) {
        fs::remove_dir(&self.0).unwrap();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _gone = fs::remove_dir(&self.0);
    }
}

impl Node {
    /// Returns a node whose control groups can be created; `None` if this user may not.
    async fn new(sections: &str) -> Option<Self> {
        let hierarchy = Hierarchy::open(&ProbeRoot::default());
        let groups = hierarchy.map(|found| found.mount_point().join("kubepods"));
        let Some(groups) = groups.filter(|groups| fs::create_dir_all(groups).is_ok()) else {
            println!(
                "left out: no group of the supervisor with a memory controller: none can be created"
            );
            return None;
        };
        let installation = Installation::new(sections);
        let api = ApiServer::start().await;
        let node = Self {
            installation,
            api,
            groups,
            arguments: vec!["--wait", "2"],
        };
        node.uses("http", "");
        Some(node)
    }

    /// Writes the kubeconfig for the present API server; `more` are fields of the cluster.
    fn uses(&self, scheme: &str, more: &str) {
        let Self {
            installation, api, ..
        } = self;
        let text = format!(
            "current-context: a\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: '{scheme}://{}'{more}}}}}]\nusers: [{{name: u, user: {{tokenFile: token}}}}]\n",
            api.address
        );
        fs::write(installation.path("kubeconfig"), text).unwrap();
        fs::write(installation.path("token"), "secret\n").unwrap();
    }

    fn start(&self) -> Driver {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.installation.path("driver.log"))
            .unwrap();
        let path = |name: &str| self.installation.path(name);
        let child = Command::new(env!("CARGO_BIN_EXE_cotenant-dra"))
            .args(["--node-name", NODE])
            .args(&self.arguments)
            .arg("--endpoint")
            .arg(format!("unix://{}", self.installation.socket().display()))
            .arg("--kubeconfig")
            .arg(path("kubeconfig"))
            .arg("--kubelet-dir")
            .arg(path("kubelet"))
            .arg("--cdi-dir")
            .arg(path("cdi"))
            .arg("--run-dir")
            .arg(path("claims"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        Driver(child.unwrap())
    }

    /// Starts supervisor and driver, registers the driver, and waits until this capacity is published.
    async fn publishes(&self, mib: u64) -> (Daemon<'_>, Driver, Kubelet) {
        let daemon = self.installation.start().await;
        let driver = self.start();
        let kubelet = self.register().await;
        let is_there = |api: &ApiServer| api.capacity_mib() == Some(mib);
        self.until("the pool is published", is_there).await;
        (daemon, driver, kubelet)
    }

    async fn register(&self) -> Kubelet {
        Kubelet::register(&self.installation.path("kubelet")).await
    }

    fn log(&self) -> String {
        fs::read_to_string(self.installation.path("driver.log")).unwrap_or_default()
    }

    /// Creates the control group of a pod.
    fn pod(&self, uid: &str) -> Pod {
        let folder = self.groups.join(format!("pod{uid}"));
        fs::create_dir_all(&folder).unwrap();
        Pod(folder)
    }

    async fn until(&self, what: &str, mut is_so: impl FnMut(&ApiServer) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(&self.api) {
            assert!(
                Instant::now() < deadline,
                "not within {PATIENCE:?}: {what}: {:?}\n{}",
                self.api.device(),
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Returns names that no other test uses.
fn unique(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

/// Returns the live leases of claims.
fn of_claims(status: &GetStatusResponse) -> Vec<&Lease> {
    let live = [LeaseState::Granted, LeaseState::Revoking];
    let leases = status.leases.iter();
    leases
        .filter(|lease| lease.tenant.starts_with("claim-") && live.contains(&lease.state()))
        .collect()
}

async fn without_leases(daemon: &Daemon<'_>) {
    let is_so = |status: &GetStatusResponse| of_claims(status).is_empty();
    daemon.until("no claim has a lease", is_so).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_becomes_a_lease_of_its_pod_that_outlives_driver_and_supervisor() {
    let Some(node) = Node::new(&budget(640)).await else {
        return;
    };
    let (daemon, driver, kubelet) = node.publishes(640).await;
    let device = node.api.device().unwrap();
    assert_eq!(device["attributes"]["class"]["string"], "interactive");
    let (uid, pod) = (unique("a"), unique("pa"));
    let group = node.pod(&pod);
    node.api.schedule(&uid, &pod, 100, None).unwrap();
    let devices = kubelet.prepare(&uid).await.unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!(
        (
            &*devices[0].pool_name,
            &*devices[0].device_name,
            devices[0].share_id()
        ),
        (NODE, "pool", &*format!("share-{uid}"))
    );
    let cdi = format!("k8s.memory.cotenant.dev/pool={uid}");
    assert_eq!(devices[0].cdi_device_ids, [cdi]);
    let status = daemon.status().await;
    let [lease] = of_claims(&status)[..] else {
        panic!("{:?}", status.leases)
    };
    assert_eq!((lease.min_bytes, lease.held_bytes), (128 * MIB, 128 * MIB));
    assert_eq!(lease.cgroup, format!("/kubepods/pod{pod}"));
    let name = lease.name.clone();

    // Kubelet repeats the call after its own restart, the driver and the supervisor are killed.
    assert_eq!(kubelet.prepare(&uid).await.unwrap(), devices);
    drop(driver);
    daemon.kill();
    let daemon = node.installation.start().await;
    let _driver = node.start();
    let kubelet = node.register().await;
    assert_eq!(kubelet.prepare(&uid).await.unwrap(), devices);
    let status = daemon.status().await;
    let names: Vec<_> = of_claims(&status)
        .iter()
        .map(|lease| lease.name.clone())
        .collect();
    assert_eq!(names, [name]);
    // What a claim has is part of the capacity, and Kubernetes subtracts it.
    node.until("the capacity is that of before", |api| {
        api.capacity_mib() == Some(640)
    })
    .await;
    assert_eq!(
        node.api.schedule("more", "p", 576, None),
        Err(Unscheduled::Capacity)
    );

    for _ in 0..2 {
        kubelet.unprepare(&uid).await.unwrap();
    }
    without_leases(&daemon).await;
    assert_eq!(
        fs::read_dir(node.installation.path("cdi")).unwrap().count(),
        0
    );
    kubelet.unprepare("never-prepared").await.unwrap();
    drop(group);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_cannot_be_prepared_is_refused_with_the_reason_and_nothing_is_lost() {
    let Some(mut node) = Node::new(&budget(320)).await else {
        return;
    };
    node.arguments = vec!["--wait", "0"];
    let (daemon, _driver, kubelet) = node.publishes(320).await;
    let (uid, pod) = (unique("b"), unique("pb"));
    let group = node.pod(&pod);
    let refused = async |claim: serde_json::Value, words: &str| {
        node.api.put_claim(claim);
        let text = kubelet.prepare(&uid).await.unwrap_err();
        assert!(text.contains(words), "`{text}` has no `{words}`");
        assert!(
            text.starts_with(&format!("cannot prepare claim `default/{uid}`: ")),
            "{text}"
        );
    };
    let with = |parameters| claim(&uid, &[&pod], 64, Some(parameters));
    refused(
        claim(&uid, &[&pod], 640, None),
        "the whole budget is 320 MiB",
    )
    .await;
    refused(
        with(json!({"class": "urgent"})),
        "class: `urgent` is none of",
    )
    .await;
    refused(
        with(json!({"class": "batch"})),
        "less urgent than `interactive`",
    )
    .await;
    refused(with(json!({"max": "1Mi"})), "max: `1Mi` is below 64 MiB").await;
    refused(with(json!({"maximum": "1Gi"})), "unknown field `maximum`").await;
    refused(
        claim(&uid, &[&pod, "other"], 64, None),
        "is reserved for 2 pods",
    )
    .await;
    refused(claim(&uid, &[], 64, None), "is reserved for no pod").await;
    refused(
        claim(&uid, &["no-such-pod"], 64, None),
        "has no control group",
    )
    .await;
    let mut other = claim(&uid, &[&pod], 64, None);
    other["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.nvidia.com".into();
    refused(other, "it is allocated to `gpu.nvidia.com/orin-1/pool`").await;
    let mut other = claim(&uid, &[&pod], 64, None);
    other["metadata"]["uid"] = "younger".into();
    refused(other, "the claim was replaced").await;
    let mut other = claim(&uid, &[&pod], 64, None);
    let results = &mut other["status"]["allocation"]["devices"]["results"];
    results[0]
        .as_object_mut()
        .unwrap()
        .remove("consumedCapacity");
    refused(other, "DRAConsumableCapacity").await;
    node.api.delete_claim(&uid);
    let text = kubelet.prepare(&uid).await.unwrap_err();
    assert!(text.contains("404 NotFound"), "{text}");

    // The API server is away, or the token has expired: kubelet tries again, and then it is prepared.
    node.api.put_claim(claim(&uid, &[&pod], 64, None));
    node.api.refuse(Some(401));
    let text = kubelet.prepare(&uid).await.unwrap_err();
    assert!(text.contains("token or certificate is expired"), "{text}");
    node.api.refuse(None);
    node.api.set_away(true);
    let text = kubelet.prepare(&uid).await.unwrap_err();
    assert!(text.contains("cannot reach the API server"), "{text}");
    node.api.set_away(false);
    assert!(of_claims(&daemon.status().await).is_empty());
    kubelet.prepare(&uid).await.unwrap();
    assert_eq!(of_claims(&daemon.status().await).len(), 1);
    // The pod is gone before its claim is reverted.
    group.remove();
    without_leases(&daemon).await;
    kubelet.unprepare(&uid).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_gets_up_to_its_maximum_and_returns_it_for_another_claim() {
    let Some(node) = Node::new(&budget(640)).await else {
        return;
    };
    let (daemon, _driver, kubelet) = node.publishes(640).await;
    let (one, two) = (unique("m1"), unique("m2"));
    let pods = [node.pod(&one), node.pod(&two)];
    let most = json!({ "class": "interactive", "max": "512Mi" });
    node.api.schedule(&one, &one, 64, Some(most)).unwrap();
    kubelet.prepare(&one).await.unwrap();
    let holds = |mib: u64, uid: &str| {
        let name = format!("claim-{uid}");
        move |status: &GetStatusResponse| {
            let leases = of_claims(status);
            leases.iter().any(|lease| {
                lease.tenant == name && lease.held_bytes == mib * MIB && lease.used_bytes == Some(0)
            })
        }
    };
    daemon.until("it holds its maximum", holds(512, &one)).await;
    let text = fs::read_dir(node.installation.path("cdi")).unwrap();
    let text = fs::read_to_string(text.flatten().next().unwrap().path()).unwrap();
    assert!(
        text.contains("MEMORY_PRESSURE_WATCH=/run/cotenant-claim/pressure"),
        "{text}"
    );
    // What it does not use is still published, and taken back for another claim.
    node.until("the capacity stays", |api| {
        api.capacity_mib() == Some(640) && api.taints().is_empty()
    })
    .await;
    node.api.schedule(&two, &two, 512, None).unwrap();
    kubelet.prepare(&two).await.unwrap();
    daemon
        .until("the other has its memory", holds(512, &two))
        .await;
    let status = daemon.status().await;
    let held: u64 = of_claims(&status)
        .iter()
        .map(|lease| lease.held_bytes)
        .sum();
    assert!(held <= 640 * MIB, "{status:?}");
    kubelet.unprepare(&two).await.unwrap();
    node.api.delete_claim(&two);
    daemon.until("it grows again", holds(512, &one)).await;
    kubelet.unprepare(&one).await.unwrap();
    without_leases(&daemon).await;
    drop(pods);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pressure_taints_the_pool_within_a_second_and_no_pod_is_placed() {
    let mut sections = budget(400);
    sections = sections.replace("dwell: 300ms", "dwell: 1s");
    let Some(mut node) = Node::new(&sections).await else {
        return;
    };
    node.installation.neighbour = Some(425);
    let (daemon, _driver, kubelet) = node.publishes(384).await;
    assert!(node.api.taints().is_empty());
    let mut health = kubelet.health().await;
    let healthy = health.message().await.unwrap().unwrap();
    assert_eq!(
        healthy.devices[0].health(),
        HealthStatus::Healthy,
        "{healthy:?}"
    );
    fs::write(node.installation.path("come"), "").unwrap();
    let pressed = |status: &GetStatusResponse| {
        status.pressure.as_ref().unwrap().level() == PressureLevel::Critical
    };
    daemon.until("pressure is Critical", pressed).await;
    let since = Instant::now();
    let blocks = |api: &ApiServer| {
        api.taints()
            .iter()
            .any(|taint| taint.ends_with(":NoSchedule"))
    };
    node.until("the pool is tainted", blocks).await;
    let took = since.elapsed();
    println!(
        "pressure to taint: {} ms, {:?}",
        took.as_millis(),
        node.api.taints()
    );
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(
        node.api.schedule("x", "x", 64, None),
        Err(Unscheduled::Tainted)
    );
    fs::remove_file(node.installation.path("come")).unwrap();
    node.until("the taints are gone", |api| api.taints().is_empty())
        .await;
    // A supervisor that is gone has no health, and after some seconds no new pods.
    daemon.kill();
    loop {
        let state = health.message().await.unwrap().unwrap();
        if state.devices[0].health() == HealthStatus::Unknown {
            break;
        }
    }
    let away = "cotenant.dev/supervisor=unreachable:NoSchedule".to_owned();
    node.until("its absence is a taint", |api| api.taints().contains(&away))
        .await;
    let daemon = node.installation.start().await;
    node.until("it is back", |api| api.taints().is_empty())
        .await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slice_that_others_delete_is_published_again_also_after_an_absence_of_the_server() {
    let Some(node) = Node::new(&budget(320)).await else {
        return;
    };
    let (daemon, driver, _kubelet) = node.publishes(320).await;
    let is_there = |api: &ApiServer| api.capacity_mib() == Some(320);
    for _ in 0..3 {
        node.api.wipe();
        node.until("the slice is published again", is_there).await;
    }
    node.api.set_away(true);
    let (uid, pod) = (unique("w"), unique("pw"));
    let _group = node.pod(&pod);
    let asked = ["hold", "camera", "--min", "100MiB", "--term", "60s"];
    let hold = Command::new(&node.installation.program)
        .args(asked)
        .env(
            "COTENANT_ENDPOINT",
            format!("unix://{}", node.installation.socket().display()),
        )
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut hold = hold.unwrap();
    let held =
        |status: &GetStatusResponse| status.leases.iter().any(|lease| lease.tenant == "camera");
    daemon.until("another program has memory", held).await;
    // Kubelet removes the slices of a plugin that is away for 30 s.
    drop(driver);
    node.api.wipe();
    let _driver = node.start();
    let kubelet = node.register().await;
    node.api.set_away(false);
    let lower = |api: &ApiServer| api.capacity_mib() == Some(192);
    node.until("the present capacity is published", lower).await;
    node.api.schedule(&uid, &pod, 128, None).unwrap();
    kubelet.prepare(&uid).await.unwrap();
    kubelet.unprepare(&uid).await.unwrap();
    hold.kill().unwrap();
    hold.wait().unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_booked_within_50_ms() {
    let Some(node) = Node::new(&budget(640)).await else {
        return;
    };
    let (daemon, _driver, kubelet) = node.publishes(640).await;
    // Other programs of the machine may disturb a round.
    let mut best = Duration::MAX;
    for round in 0..5 {
        let mut took = Vec::new();
        for number in 0..100 {
            let uid = unique(&format!("t{round}-{number}"));
            let _group = node.pod(&uid);
            node.api.put_claim(claim(&uid, &[&uid], 64, None));
            let since = Instant::now();
            kubelet.prepare(&uid).await.unwrap();
            took.push(since.elapsed());
            kubelet.unprepare(&uid).await.unwrap();
            node.api.delete_claim(&uid);
        }
        took.sort_unstable();
        println!("claim to lease: median {:?}, p99 {:?}", took[50], took[98]);
        best = best.min(took[98]);
        if best <= Duration::from_millis(50) {
            break;
        }
    }
    assert!(best <= Duration::from_millis(50), "{best:?}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lease_is_lost_or_doubled_by_100_kills() {
    let Some(node) = Node::new(&budget(640)).await else {
        return;
    };
    let daemon = node.installation.start().await;
    let mut driver = node.start();
    let mut kubelet = node.register().await;
    let mut pods: Vec<(String, Pod)> = Vec::new();
    for number in 0..100_u64 {
        let is_new = pods.len() < 3 || (number % 2 == 0 && pods.len() < 8);
        if is_new {
            let uid = unique(&format!("k{number}"));
            node.api.put_claim(claim(&uid, &[&uid], 64, None));
            pods.push((uid.clone(), node.pod(&uid)));
        }
        let uid = if is_new { pods.last() } else { pods.first() }
            .unwrap()
            .0
            .clone();
        let call = async |kubelet: &Kubelet| {
            if is_new {
                kubelet.prepare(&uid).await.map(drop)
            } else {
                kubelet.unprepare(&uid).await
            }
        };
        // Killed at any time of the call, some before and some after it.
        let point = Duration::from_micros(number * 150);
        let called = async {
            let _outcome = call(&kubelet).await;
        };
        let killed = async {
            tokio::time::sleep(point).await;
            drop(driver);
        };
        tokio::join!(called, killed);
        driver = node.start();
        kubelet = node.register().await;
        call(&kubelet).await.unwrap();
        if !is_new {
            pods.remove(0);
        }
        let status = daemon.status().await;
        let mut held: Vec<&str> = of_claims(&status)
            .iter()
            .map(|lease| &*lease.tenant)
            .collect();
        held.sort_unstable();
        let mut expected: Vec<String> =
            pods.iter().map(|(uid, _)| format!("claim-{uid}")).collect();
        expected.sort_unstable();
        assert_eq!(
            held,
            expected,
            "after kill {number} at {point:?}\n{}",
            node.log()
        );
        let files = fs::read_dir(node.installation.path("cdi")).unwrap().count();
        assert_eq!(files, pods.len());
    }
    for (uid, _) in &pods {
        kubelet.unprepare(uid).await.unwrap();
    }
    without_leases(&daemon).await;
    drop(driver);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_server_is_believed_only_with_a_certificate_of_its_roots_that_is_valid_now() {
    if !openssl_is_there() {
        return;
    }
    let Some(mut node) = Node::new(&budget(320)).await else {
        return;
    };
    let (roots, other) = (
        Ca::new(node.installation.path("roots")),
        Ca::new(node.installation.path("other")),
    );
    roots.issue("now", 2);
    roots.issue("expired", -1);
    let daemon = node.installation.start().await;
    let uid = unique("tls");
    let _group = node.pod(&uid);
    for (certificate, ca, words) in [
        ("now", &other, "invalid peer certificate"),
        ("expired", &roots, "xpired"),
        ("now", &roots, ""),
    ] {
        let chain =
            CertificateDer::pem_file_iter(roots.file(&format!("{certificate}.pem"))).unwrap();
        let key = PrivateKeyDer::from_pem_file(roots.file(&format!("{certificate}.key"))).unwrap();
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain.map(Result::unwrap).collect(), key);
        node.api = ApiServer::start_with(Some(config.unwrap())).await;
        node.uses(
            "https",
            &format!(", certificate-authority: {}", ca.file("ca.pem").display()),
        );
        let _driver = node.start();
        let kubelet = node.register().await;
        node.api.put_claim(claim(&uid, &[&uid], 64, None));
        let prepared = kubelet.prepare(&uid).await;
        match prepared {
            Ok(_) => assert_eq!(words, ""),
            Err(text) => assert!(!words.is_empty() && text.contains(words), "{text}"),
        }
    }
    let is_there = |api: &ApiServer| api.capacity_mib() == Some(320);
    let _driver = node.start();
    node.until("the pool is published over TLS", is_there).await;
    let kubelet = node.register().await;
    kubelet.unprepare(&uid).await.unwrap();
    daemon.end().await;
}
