//! Addresses that are missing when the daemon starts, as at boot.

use super::installation::{Installation, ballast, said};

/// Documentation address (RFC 5737), which no machine has.
const ABSENT: &str = "192.0.2.7";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_is_not_there_yet_keeps_nothing_else_from_being_served() {
    let sections = format!(
        "wyoming: {{listen: ['tcp://{ABSENT}:0', 'tcp://127.0.0.1:0']}}\nworkers:\n{}",
        ballast()
    );
    let installation = Installation::new("");
    installation.configure_with_http(&sections, &format!("{ABSENT}:0"));
    let daemon = installation.start().await;
    assert_eq!(daemon.http.ip().to_string(), ABSENT);
    let status = daemon
        .until("the worker is ready", |status| {
            status
                .workers
                .iter()
                .all(|worker| worker.state() == cotenant::rpc::v1::WorkerState::Ready)
        })
        .await;
    assert_eq!(
        status.absent_addresses,
        [
            format!("http.listen: {ABSENT}:0"),
            format!("wyoming.listen: {ABSENT}:0")
        ]
    );
    installation
        .logged(&format!(
            "`http.listen: {ABSENT}:0` is not an address of this machine; it is served once"
        ))
        .await;
    let shown = installation.tell(&["status"]);
    assert!(
        shown.contains(&format!(
            "`http.listen: {ABSENT}:0` is not an address of this machine"
        )),
        "{shown}"
    );
    let check = installation.run(&["check", installation.config().to_str().unwrap()]);
    assert!(check.status.success(), "{}", said(&check));
    assert!(said(&check).contains(&format!(
        "`wyoming.listen: {ABSENT}:0` is not currently an address of this machine"
    )));
    daemon.end().await;
}
