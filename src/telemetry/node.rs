//! Identity of a machine, as labels of one metric.

use prometheus_client::metrics::family::Family;

use crate::table::{Labels, Size, Table, labels};

/// Identity of a machine and its configuration; unknown parts are empty, which Prometheus treats as absent labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// Model of the board, from its device tree.
    pub board: String,
    /// Release of L4T: `36.4.7`.
    pub l4t: String,
    /// Name of the LLM.
    pub model: String,
    /// Hash of the configuration in force.
    pub config_hash: String,
}

#[derive(Debug)]
pub(crate) struct Node(Family<Labels<5>, Size>);

impl Node {
    pub(crate) fn add(table: &mut Table) -> Self {
        Self(table.add(
            "node_info",
            "1, with the board, its L4T release, the LLM, the hash of the configuration in force, and the version",
        ))
    }

    pub(crate) fn set(&self, node: &NodeInfo) {
        // Other labels are another series.
        self.0.clear();
        let labels = labels([
            ("board", &node.board),
            ("l4t", &node.l4t),
            ("model", &node.model),
            ("config_hash", &node.config_hash),
            ("version", env!("CARGO_PKG_VERSION")),
        ]);
        self.0.get_or_create(&labels).set(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Metrics;

    #[test]
    fn a_node_has_one_identity_at_a_time() {
        let metrics = Metrics::new();
        for config_hash in ["1", "2"] {
            metrics.set_node(&NodeInfo {
                config_hash: config_hash.to_owned(),
                ..NodeInfo::default()
            });
        }
        let text = metrics.encode();
        let nodes: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("cotenant_node_info{"))
            .collect();
        let version = env!("CARGO_PKG_VERSION");
        let expected = format!(
            r#"cotenant_node_info{{board="",l4t="",model="",config_hash="2",version="{version}"}} 1"#
        );
        assert_eq!(nodes, [expected.as_str()]);
    }
}
