//! Settings of gRPC: sockets, roles, and limits per peer.

use std::{net::SocketAddr, path::Path, time::Duration};

use super::{
    GrpcConfig, GrpcLimits, TcpConfig,
    checker::{Checker, MINUTE, SECOND, SOCKET_PATH_MAX},
    raw::{RawBounds, RawGrpc, RawGrpcLimits, RawIds, RawRoles, RawTcp, Text},
};
use cotenant_policy::roles::{Bounds, Ids, Members, Role};
use cotenant_units::Bytes;

pub(super) fn check(checker: &mut Checker, raw: &RawGrpc, runtime_dir: &Path) -> GrpcConfig {
    let socket = match raw.socket.0.as_deref() {
        Some("none") => None,
        Some(_) => checker.socket("grpc.socket", &raw.socket),
        None => {
            let socket = runtime_dir.join("cotenant.sock");
            checker
                .socket_fits("runtime_dir", &socket)
                .then_some(socket)
        }
    };
    let abstract_name = match checker.given("grpc.abstract_name", &raw.abstract_name) {
        None => Some("cotenant".to_owned()),
        Some("none") => None,
        Some(name)
            if name.is_empty() || name.len() > SOCKET_PATH_MAX - 1 || name.contains('\0') =>
        {
            checker.fault(
                "grpc.abstract_name",
                format!("has {} bytes, not 1 to {}", name.len(), SOCKET_PATH_MAX - 1),
                Some("write a name, or `none`"),
            );
            None
        }
        Some(name) => Some(name.strip_prefix('@').unwrap_or(name).to_owned()),
    };
    if raw.socket.0.as_deref() == Some("none") && raw.abstract_name.0.as_deref() == Some("none") {
        checker.fault(
            "grpc",
            "both sockets are `none`: no client can reach the supervisor",
            Some("omit one of `socket: none` and `abstract_name: none`"),
        );
    }
    GrpcConfig {
        socket,
        abstract_name,
        tcp: raw.tcp.as_ref().and_then(|raw| tcp(checker, raw)),
        roles: roles(checker, &raw.roles),
        limits: limits(checker, &raw.limits),
    }
}

fn tcp(checker: &mut Checker, raw: &RawTcp) -> Option<TcpConfig> {
    for (key, text) in [
        ("listen", &raw.listen),
        ("cert", &raw.cert),
        ("key", &raw.key),
        ("client_ca", &raw.client_ca),
    ] {
        checker.require(&format!("grpc.tcp.{key}"), text, TCP_HINT);
    }
    let listen = checker
        .given("grpc.tcp.listen", &raw.listen)
        .and_then(|written| {
            let address = written.parse::<SocketAddr>().ok();
            if address.is_none() {
                let problem = format!("`{}` is not an address and port", written.escape_debug());
                checker.fault(
                    "grpc.tcp.listen",
                    problem,
                    Some("write an address with its port, for example `0.0.0.0:8411`"),
                );
            }
            address
        });
    let mut file = |key: &str, text| checker.directory(&format!("grpc.tcp.{key}"), text);
    let (cert, key, client_ca) = (
        file("cert", &raw.cert),
        file("key", &raw.key),
        file("client_ca", &raw.client_ca),
    );
    // Tenant and delegate are excluded: the holder of a lease is a process measured on this machine.
    let roles = [
        ("operator", Role::Operator),
        ("viewer", Role::Viewer),
        ("watchdog", Role::Watchdog),
    ];
    let role = checker
        .one_of("grpc.tcp.role", &raw.role, &roles)
        .unwrap_or(Role::Viewer);
    Some(TcpConfig {
        listen: listen?,
        cert: cert?,
        key: key?,
        client_ca: client_ca?,
        role,
    })
}

const TCP_HINT: &str = "`grpc.tcp` needs `listen`, `cert`, `key` and `client_ca`; no client is served without a certificate";

fn roles(checker: &mut Checker, raw: &RawRoles) -> Members {
    let mut ids = |role: &str, raw: &RawIds| Ids {
        uids: numbers(checker, &format!("grpc.roles.{role}.uids"), &raw.uids),
        gids: numbers(checker, &format!("grpc.roles.{role}.gids"), &raw.gids),
    };
    Members {
        operators: ids("operators", &raw.operators),
        watchdogs: ids("watchdogs", &raw.watchdogs),
        delegates: ids("delegates", &raw.delegates),
        tenants: ids("tenants", &raw.tenants),
        viewers: ids("viewers", &raw.viewers),
        others: checker
            .one_of(
                "grpc.roles.others",
                &raw.others,
                &[
                    ("none", None),
                    ("tenant", Some(Role::Tenant)),
                    ("viewer", Some(Role::Viewer)),
                ],
            )
            .flatten(),
    }
}

/// Reads ids of users or groups. The highest number is not an id: it means none (`chown(2)`).
fn numbers(checker: &mut Checker, at: &str, raw: &[Text]) -> Vec<u32> {
    if raw.len() > IDS_MAX {
        checker.fault(
            at,
            format!("has {} ids, at most {IDS_MAX} are read", raw.len()),
            Some("add the users to one group, and list that"),
        );
    }
    let ids = raw.iter().take(IDS_MAX).enumerate();
    ids.filter_map(|(index, text)| id(checker, &format!("{at}[{index}]"), text))
        .collect()
}

/// Reads an id; if a name is written instead, the fault says how to find its id.
fn id(checker: &mut Checker, key: &str, text: &Text) -> Option<u32> {
    let number = checker.number(key, text, 0..=u32::MAX - 1);
    let name = text
        .0
        .as_deref()
        .filter(|name| name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'));
    if let (None, Some(name), Some(fault)) = (number, name, checker.faults.last_mut()) {
        let command = if key.contains(".gids[") {
            format!("getent group {name}")
        } else {
            format!("id -u {name}")
        };
        fault.hint = Some(format!("write the number that `{command}` prints"));
    }
    number
}

fn limits(checker: &mut Checker, raw: &RawGrpcLimits) -> GrpcLimits {
    let mut bounds = |what: &str, raw: &RawBounds| {
        let mut bound = |name: &str, text: &Text, default: u64| {
            checker
                .number(&format!("grpc.limits.{what}.{name}"), text, 1..=BOUND_MAX)
                .unwrap_or(default)
        };
        Bounds {
            per_process: bound("per_process", &raw.per_process, 32),
            per_user: bound("per_user", &raw.per_user, 256),
            total: bound("total", &raw.total, 1024),
        }
    };
    GrpcLimits {
        connections: bounds("connections", &raw.connections),
        streams: bounds("streams", &raw.streams),
        message_max: checker
            .size(
                "grpc.limits.message_max",
                &raw.message_max,
                Bytes::from_kib(4)..=Bytes::from_mib(64),
            )
            .unwrap_or(Bytes::from_mib(1)),
        calls_per_connection: checker
            .number(
                "grpc.limits.calls_per_connection",
                &raw.calls_per_connection,
                1..=10_000,
            )
            .unwrap_or(64),
        reader_patience: checker
            .duration(
                "grpc.limits.reader_patience",
                &raw.reader_patience,
                SECOND..=MINUTE * 10,
            )
            .unwrap_or(Duration::from_secs(20)),
    }
}

/// Ids in one list: more than a household needs.
const IDS_MAX: usize = 256;

/// More than one machine serves. Our choice.
const BOUND_MAX: u64 = 100_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn roles_and_limits_are_read() {
        let grpc = Config::parse(
            "grpc: {roles: {tenants: {uids: [1000, 1001], gids: [44]}, others: viewer}, \
             limits: {connections: {per_process: 500}, reader_patience: 5s}}",
        )
        .unwrap()
        .grpc;
        assert_eq!(grpc.roles.tenants.uids, [1000, 1001]);
        assert_eq!(grpc.roles.tenants.gids, [44]);
        assert_eq!(grpc.roles.others, Some(Role::Viewer));
        assert_eq!(grpc.limits.connections.per_process, 500);
        assert_eq!(grpc.limits.connections.total, 1024);
        assert_eq!(grpc.limits.reader_patience, Duration::from_secs(5));
    }

    #[test]
    fn what_is_no_id_and_no_limit_is_reported_with_its_place() {
        for (text, expected) in [
            (
                "roles: {tenants: {uids: [alice]}}",
                "write the number that `id -u alice` prints",
            ),
            (
                "roles: {tenants: {gids: [video]}}",
                "write the number that `getent group video` prints",
            ),
            (
                "roles: {tenants: {uids: [alice]}}",
                "grpc.roles.tenants.uids[0]",
            ),
            (
                "roles: {viewers: {gids: [1, -1]}}",
                "grpc.roles.viewers.gids[1]",
            ),
            (
                "roles: {operators: {uids: [4294967295]}}",
                "grpc.roles.operators.uids[0]",
            ),
            ("roles: {others: operator}", "grpc.roles.others"),
            (
                "limits: {streams: {per_user: 0}}",
                "grpc.limits.streams.per_user",
            ),
            ("limits: {message_max: 1GiB}", "grpc.limits.message_max"),
            (
                "tcp: {listen: \"0.0.0.0:8411\"}",
                "grpc.tcp.client_ca: is required",
            ),
            ("tcp: {listen: box}", "grpc.tcp.listen"),
            ("tcp: {role: tenant}", "grpc.tcp.role"),
        ] {
            let kind = Config::parse(&format!("grpc: {{{text}}}")).unwrap_err();
            let reported = format!("{kind}; {}", kind.hints().join("; "));
            assert!(reported.contains(expected), "{text}: {reported}");
        }
    }
}
