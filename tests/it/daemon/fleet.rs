//! gRPC over TLS for other machines: only certificates of the fleet's CA, and no leases.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use super::installation::{Installation, PROGRAM, budget, said};

/// Certificates of one CA in a separate folder.
pub(super) struct Ca(PathBuf);

pub(super) fn openssl_is_there() -> bool {
    let found = Command::new("openssl").arg("version").output();
    if let Err(error) = &found {
        println!("left out: `openssl` cannot be run: {error}");
    }
    found.is_ok()
}

fn openssl(folder: &Path, arguments: &str) {
    let made = Command::new("openssl")
        .args(arguments.split_whitespace())
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(made.status.success(), "{arguments}: {}", said(&made));
}

impl Ca {
    pub(super) fn new(folder: PathBuf) -> Self {
        fs::create_dir(&folder).unwrap();
        openssl(
            &folder,
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.pem -subj /CN=fleet -days 2",
        );
        fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1\n").unwrap();
        Self(folder)
    }

    /// Creates `NAME.pem` and `NAME.key`, valid for this many days.
    pub(super) fn issue(&self, name: &str, days: i32) {
        openssl(
            &self.0,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}"
            ),
        );
        openssl(
            &self.0,
            &format!(
                "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days {days} -extfile names"
            ),
        );
        fs::set_permissions(
            self.file(&format!("{name}.key")),
            fs::Permissions::from_mode(0o600),
        )
        .unwrap();
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// Runs `cotenant` as another machine; `identity` is its certificate and the CA that it trusts.
fn cotenant(url: &str, command: &[&str], identity: Option<(&Ca, &str, &Ca)>) -> Output {
    let mut run = Command::new(PROGRAM);
    run.args(["--endpoint", url]);
    if let Some((ca, name, trusted)) = identity {
        run.arg("--cert").arg(ca.file(&format!("{name}.pem")));
        run.arg("--key").arg(ca.file(&format!("{name}.key")));
        run.arg("--ca").arg(trusted.file("ca.pem"));
    }
    run.args(command).output().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_certificates_of_the_fleet_are_served_over_tcp() {
    if !openssl_is_there() {
        return;
    }
    let installation = Installation::new("");
    let (fleet, other) = (
        Ca::new(installation.path("fleet")),
        Ca::new(installation.path("other")),
    );
    for (ca, name, days) in [
        (&fleet, "box", 2),
        (&fleet, "desk", 2),
        (&fleet, "old", -1),
        (&other, "outsider", 2),
    ] {
        ca.issue(name, days);
    }
    let folder = fleet.0.display();
    let tcp = |key: &str| {
        format!(
            "tcp: {{listen: \"127.0.0.1:0\", cert: {folder}/box.pem, key: {folder}/{key}, client_ca: {folder}/ca.pem, role: watchdog}}"
        )
    };
    // Mismatched files, and a key readable by other users, are errors of the start.
    installation.configure_grpc(&budget(64), &tcp("desk.key"));
    let (status, text) = installation.refuses_to_start();
    assert!(
        status.code() == Some(1) && text.contains("must belong together"),
        "{text}"
    );
    fs::set_permissions(fleet.file("box.key"), fs::Permissions::from_mode(0o644)).unwrap();
    installation.configure_grpc(&budget(64), &tcp("box.key"));
    let (status, text) = installation.refuses_to_start();
    assert!(
        status.code() == Some(78) && text.contains("mode 0644"),
        "{text}"
    );
    fs::set_permissions(fleet.file("box.key"), fs::Permissions::from_mode(0o600)).unwrap();

    let daemon = installation.start().await;
    let log = installation.logged("https://127.0.0.1:").await;
    let at = log.rfind("https://127.0.0.1:").unwrap();
    let url: String = log[at..]
        .chars()
        .take_while(|c| c.is_ascii_alphanumeric() || ":/.".contains(*c))
        .collect();
    let url = url.as_str();
    let shown = cotenant(url, &["status"], Some((&fleet, "desk", &fleet)));
    assert!(
        shown.status.success() && said(&shown).contains("budget"),
        "{}",
        said(&shown)
    );
    let health = cotenant(url, &["health"], Some((&fleet, "desk", &fleet)));
    assert_eq!(health.status.code(), Some(0), "{}", said(&health));

    // The role is the configured one, and leases are only for processes of this machine.
    let regrow = cotenant(url, &["regrow"], Some((&fleet, "desk", &fleet)));
    assert!(
        regrow.status.code() == Some(4) && said(&regrow).contains("not open to this client"),
        "{}",
        said(&regrow)
    );
    let drain = cotenant(url, &["drain"], Some((&fleet, "desk", &fleet)));
    assert!(drain.status.success(), "{}", said(&drain));
    let events = installation.events();
    assert!(
        events.contains("a drain is requested by certificate `desk`"),
        "{events}"
    );
    let leases = cotenant(url, &["leases"], Some((&fleet, "desk", &fleet)));
    assert!(!leases.status.success(), "{}", said(&leases));

    for (identity, words) in [
        (None, "needs a certificate, its key and the CA"),
        (
            Some((&fleet, "old", &fleet)),
            "refuses this client's certificate: it expired",
        ),
        (
            Some((&other, "outsider", &fleet)),
            "refuses this client's certificate: not signed by the CA in `grpc.tcp.client_ca`",
        ),
        (Some((&fleet, "desk", &other)), "invalid peer certificate"),
    ] {
        let refused = cotenant(url, &["status"], identity);
        let text = said(&refused);
        assert!(
            [Some(3), Some(4)].contains(&refused.status.code()),
            "{text}"
        );
        // If the connection is reset before the alert is read, its reason is lost.
        let named = text.contains(words) || text.contains("may refuse this client's certificate");
        assert!(named && text.contains("hint: "), "{words}: {text}");
    }
    daemon.end().await;
}
