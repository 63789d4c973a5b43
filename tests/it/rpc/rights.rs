//! Access rights by the kernel's peer credentials.

use cotenant::rpc::{
    Role, Roles,
    v1::{
        self, lease_service_client::LeaseServiceClient, llm_service_client::LlmServiceClient,
        operator_service_client::OperatorServiceClient,
    },
};
use tonic::{Code, Status, transport::Channel};

use super::daemon::{Daemon, Settings, granted, reason, request};
use crate::support::channel_of;

const TENANT: u32 = 61_001;
const NEIGHBOUR: u32 = 61_002;
const VIEWER: u32 = 61_003;
const WATCHDOG: u32 = 61_004;
const OTHER_UID: u32 = 61_005;
const DELEGATE: u32 = 61_006;

fn roles() -> Roles {
    let mut roles = Roles::new(nix::unistd::getuid().as_raw());
    roles.members.tenants.uids = vec![TENANT, NEIGHBOUR];
    roles.members.viewers.uids = vec![VIEWER];
    roles.members.watchdogs.uids = vec![WATCHDOG];
    roles.members.delegates.uids = vec![DELEGATE];
    roles
}

/// Returns the result of each kind of call: `ok`, or the reason of its refusal.
async fn said(channel: &Channel, uid: u32) -> [String; 7] {
    fn word<T>(result: Result<T, Status>) -> String {
        match result {
            Ok(_) => "ok".to_owned(),
            Err(status) => reason(&status).1,
        }
    }
    let mut leases = LeaseServiceClient::new(channel.clone());
    let mut operator = OperatorServiceClient::new(channel.clone());
    let mut llm = LlmServiceClient::new(channel.clone());
    let prompt = v1::GenerateRequest {
        input: Some(v1::generate_request::Input::Prompt("hello".into())),
        ..v1::GenerateRequest::default()
    };
    let asked = v1::CreateLeaseRequest {
        validate_only: true,
        ..request(&format!("r{uid}"), &format!("t{uid}"), 10)
    };
    let of_group = v1::CreateLeaseRequest {
        cgroup: "/camera.service".to_owned(),
        ..asked.clone()
    };
    [
        word(operator.get_status(v1::GetStatusRequest {}).await),
        word(leases.list_leases(v1::ListLeasesRequest::default()).await),
        word(leases.create_lease(asked).await),
        word(llm.generate(prompt).await),
        word(
            operator
                .shed(v1::ShedRequest {
                    shed_bytes: 1 << 20,
                })
                .await,
        ),
        word(operator.regrow(v1::RegrowRequest {}).await),
        word(leases.create_lease(of_group).await),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_role_does_what_it_may_and_another_user_nothing() {
    let daemon = Daemon::start_with(Settings {
        roles: roles(),
        ..Settings::default()
    })
    .await;
    let (ok, no) = ("ok", "ROLE_MISSING");
    // Other reasons, such as a shed without a model, are independent of the caller.
    for (uid, [status, list, create, generate, shed, regrow, of_group]) in [
        (DELEGATE, [ok, ok, ok, ok, no, no, ok]),
        (TENANT, [ok, ok, ok, ok, no, no, no]),
        (VIEWER, [ok, ok, no, no, no, no, no]),
        (WATCHDOG, [ok, ok, no, no, ok, no, no]),
        (OTHER_UID, [no, no, no, no, no, no, no]),
    ] {
        let Some(channel) = channel_of(&daemon.abstract_name, uid).await else {
            println!("left out: becoming another user needs CAP_SETUID");
            return;
        };
        let said = said(&channel, uid).await;
        let expected = [status, list, create, generate, shed, regrow, of_group];
        for (said, expected) in said.iter().zip(expected) {
            assert_eq!(
                said == no,
                expected == no,
                "uid {uid}: {said:?}, expected {expected}"
            );
        }
    }
    // A right for all users includes unmanaged processes.
    daemon.end().await;
    let mut roles = roles();
    roles.members.others = Some(Role::Viewer);
    let daemon = Daemon::start_with(Settings {
        roles,
        ..Settings::default()
    })
    .await;
    let channel = channel_of(&daemon.abstract_name, OTHER_UID).await.unwrap();
    let mut operator = OperatorServiceClient::new(channel);
    operator.get_status(v1::GetStatusRequest {}).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_touches_its_own_leases_only() {
    let daemon = Daemon::start_with(Settings {
        roles: roles(),
        ..Settings::default()
    })
    .await;
    let (Some(one), Some(other)) = (
        channel_of(&daemon.abstract_name, TENANT).await,
        channel_of(&daemon.abstract_name, NEIGHBOUR).await,
    ) else {
        println!("left out: becoming another user needs CAP_SETUID");
        return;
    };
    let lease = granted(
        &mut LeaseServiceClient::new(one.clone()),
        request("one", "camera", 10),
    )
    .await;
    assert_eq!(lease.owner_uid, TENANT);
    let held = daemon.held();
    let mut thief = LeaseServiceClient::new(other.clone());
    let (name, boot_id, generation) = (lease.name.clone(), lease.boot_id.clone(), lease.generation);
    let refused = |status: Status| {
        assert_eq!(
            reason(&status),
            (Code::PermissionDenied, "NOT_HOLDER".into()),
            "{status:?}"
        );
    };
    let renew = v1::RenewLeaseRequest {
        name: name.clone(),
        boot_id: boot_id.clone(),
        generation,
    };
    refused(thief.renew_lease(renew.clone()).await.unwrap_err());
    let update = v1::UpdateLeaseRequest {
        name: name.clone(),
        boot_id: boot_id.clone(),
        generation,
        min_bytes: 1,
        ..v1::UpdateLeaseRequest::default()
    };
    refused(thief.update_lease(update).await.unwrap_err());
    let release = v1::ReleaseLeaseRequest {
        name: name.clone(),
        boot_id: boot_id.clone(),
        generation,
    };
    refused(thief.release_lease(release.clone()).await.unwrap_err());
    let hold = v1::HoldLeaseRequest {
        name,
        boot_id,
        generation,
        ..v1::HoldLeaseRequest::default()
    };
    let mut stream = thief
        .hold_lease(tokio_stream::once(hold))
        .await
        .unwrap()
        .into_inner();
    refused(stream.message().await.unwrap_err());
    // The same id from another user is another request, and the ledger shows the one existing lease.
    let theirs = granted(&mut thief, request("one", "radio", 5)).await;
    assert_ne!(theirs.name, lease.name);
    thief
        .release_lease(v1::ReleaseLeaseRequest {
            name: theirs.name,
            boot_id: theirs.boot_id,
            generation: theirs.generation,
        })
        .await
        .unwrap();
    LeaseServiceClient::new(one.clone())
        .renew_lease(renew)
        .await
        .unwrap();
    daemon.state(|snapshot| snapshot.memory.held == held).await;
    // An operator may end it.
    daemon.leases().await.release_lease(release).await.unwrap();
    daemon.end().await;
}
