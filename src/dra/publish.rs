//! Keeps the ResourceSlice of the node in the API server.

use std::sync::Arc;

use serde_json::Value;
use tokio::time::{Duration, sleep, timeout};
use tracing::{info, warn};

use super::{
    claim::string,
    driver::Driver,
    kube::KubeError,
    slice::{self, WallClock},
};
use cotenant_units::causes::in_one_line;

/// Publishes each change, and the slice again after others have deleted it, until the process ends.
pub(crate) async fn run(driver: Arc<Driver>, clock: WallClock) {
    let mut changes = driver.view.changes.subscribe();
    let (mut owner, mut is_first) = (None, true);
    let mut pause = PAUSE_MIN;
    loop {
        changes.mark_unchanged();
        match publish(&driver, clock, &mut owner).await {
            Ok(published) => {
                if is_first && published {
                    info!(slice = slice::name(&driver.own), "published");
                    is_first = false;
                    if let Err(error) = delete_others(&driver).await {
                        warn!(
                            error = in_one_line(&error),
                            "cannot delete other slices of this node"
                        );
                    }
                }
                if pause > PAUSE_MIN {
                    info!("the slice is published again");
                }
                pause = PAUSE_MIN;
                // Renewed although unchanged: an edit by hand is not reported by the watch.
                let _late = timeout(RENEW_AFTER, changes.changed()).await;
            }
            Err(error) => {
                if pause == PAUSE_MIN {
                    warn!(error = in_one_line(&error), "cannot publish the slice");
                }
                sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}

/// Watches the slice, and reports its deletion as a change, until the process ends.
pub(crate) async fn watch(driver: Arc<Driver>) {
    let path = format!(
        "{SLICES}?watch=true&timeoutSeconds=300&fieldSelector={}",
        own_slices(&driver)
    );
    loop {
        if let Ok(mut watch) = driver.kube.watch(&path).await {
            while let Ok(Some(change)) = watch.next().await {
                if string(&change, "/type") == Some("DELETED") {
                    info!("the slice was deleted; publishing it again");
                    driver.view.changes.send_modify(|count| *count += 1);
                }
            }
        }
        sleep(PAUSE_MIN).await;
    }
}

/// Writes the present slice; `false` if there is none yet.
async fn publish(
    driver: &Driver,
    clock: WallClock,
    owner: &mut Option<String>,
) -> Result<bool, KubeError> {
    let pool = driver.view.pool();
    let Some(offer) = pool.offer() else {
        return Ok(false);
    };
    if owner.is_none() {
        let node = driver
            .kube
            .get(&format!("/api/v1/nodes/{}", driver.own.node))
            .await?;
        *owner = string(&node, "/metadata/uid").map(str::to_owned);
    }
    let traits = driver.view.traits();
    let slice = slice::slice(&driver.own, owner.as_deref(), offer, &traits, clock);
    let path = format!("{SLICES}/{}", slice::name(&driver.own));
    driver.kube.apply(&path, &slice).await?;
    Ok(true)
}

/// Deletes slices of this driver and node under other names, as of an earlier name of the driver's slice.
async fn delete_others(driver: &Driver) -> Result<(), KubeError> {
    let own = &driver.own;
    let path = format!("{SLICES}?fieldSelector={}", own_slices(driver));
    let list = driver.kube.get(&path).await?;
    let items = list.get("items").and_then(Value::as_array);
    for item in items.into_iter().flatten() {
        if let Some(name) = string(item, "/metadata/name").filter(|name| *name != slice::name(own))
        {
            driver.kube.delete(&format!("{SLICES}/{name}")).await?;
        }
    }
    Ok(())
}

/// Selects the slices of this driver on this node, for which the account of a node has the right too.
fn own_slices(driver: &Driver) -> String {
    let own = &driver.own;
    format!("spec.driver%3D{},spec.nodeName%3D{}", own.driver, own.node)
}

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// Pauses between attempts. Our choice: the server is back for most of the nodes before the longest.
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Time after which an unchanged slice is written again.
const RENEW_AFTER: Duration = Duration::from_secs(60);
