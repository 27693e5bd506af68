//! I9: stopping the process at any instant and starting it again gives the same result.
//!
//! `RECONCILED_TEST_SEED` and `RECONCILED_TEST_KILLS` repeat or lengthen it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use reconciled::sim::gateway::OrderUpdate;

use super::scene::{ELSEWHERE, Scene, VALID_FOR};
use crate::support::daemon::eventually;
use crate::support::dice::{Dice, from_environment, seed};

/// Payments with a fate, at least; a duplicate and a reused authorization bring a second payment along.
const FATES: u64 = 120;

/// More are played while there are kills to come, but not for ever.
const FATES_MAX: u64 = 999;

/// Kills, unless the environment says otherwise.
const KILLS: u64 = 9;

/// The longest and the shortest life between two kills.
const LIFE_MS: std::ops::Range<u64> = 150..1_400;

/// What the gateway's tables and ours must say in the end.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ending {
    /// Order to status and payer.
    orders: BTreeMap<String, (String, Option<String>)>,
    payments: BTreeMap<String, String>,
    /// `reason:payment`
    refunds: BTreeSet<String>,
    /// `kind:order`, each once.
    events: Vec<String>,
    /// `kind:payment`
    flags: BTreeSet<String>,
    /// Order to the status of what it held.
    reservations: BTreeMap<String, String>,
    shelf: i64,
}

impl Ending {
    fn payment(&mut self, id: &str, status: &str) {
        self.payments.insert(id.to_owned(), status.to_owned());
    }

    fn order(&mut self, id: &str, status: &str, paid_by: Option<&str>, stock: &str) {
        let order = (status.to_owned(), paid_by.map(str::to_owned));
        self.orders.insert(id.to_owned(), order);
        self.reservations.insert(id.to_owned(), stock.to_owned());
        self.shelf += i64::from(stock == "released");
    }

    fn paid(&mut self, payment: &str, order: &str) {
        self.payment(payment, "settled");
        self.order(order, "paid", Some(payment), "committed");
        self.events.push(format!("order.paid:{order}"));
    }

    fn failed(&mut self, payment: &str, order: &str) {
        self.payment(payment, "failed");
        self.order(order, "failed", None, "released");
        self.events.push(format!("order.failed:{order}"));
    }

    fn owed(&mut self, payment: &str, order: &str, reason: &str) {
        self.payment(payment, "settled");
        self.refunds.insert(format!("{reason}:{payment}"));
        self.events.push(format!("refund.owed:{order}"));
    }

    async fn seen(scene: &Scene) -> Self {
        let gateway = &scene.gateway;
        let refunds = gateway.refunds().await.unwrap();
        let mut events = gateway.events().await.unwrap();
        events.sort();
        Self {
            orders: gateway.orders().await.unwrap(),
            payments: gateway.payments().await.unwrap(),
            refunds: refunds.iter().map(|r| format!("{}:{}", r.reason, r.payment_id)).collect(),
            events,
            flags: gateway.open_flags().await.unwrap().into_iter().collect(),
            reservations: gateway.reservations_by_order().await.unwrap(),
            shelf: scene.shelf().await.parse().unwrap(),
        }
    }
}

/// Orders paid twice, with both payments: which one is applied first is not given.
type PaidTwice = Vec<(String, String, String)>;

/// Gives one payment its fate, and says how it must end.
async fn play(scene: &Scene, n: u64, dice: &mut Dice, ending: &mut Ending, twice: &mut PaidTwice) {
    let (id, order) = (format!("p{n:03}"), format!("o{n:03}"));
    let status = ["unknown", "settle_failed", "settling"][dice.roll(0..3) as usize];
    let mut authorization = scene.sign().await;
    // Only the last fate may expire before the end.
    let fate = n % 8;
    if fate != 7 {
        authorization.valid_before += 10 * VALID_FOR;
    }
    scene.order(&order).await;
    scene.pay(&id, &order, status, &authorization).await;
    match fate {
        0 | 1 => {
            scene.land(&authorization).await;
            ending.paid(&id, &order);
        }
        2 => {
            // Both land in one transaction: one of them pays, the other is owed back.
            let (second, again) = (format!("{id}-again"), scene.sign().await);
            scene.pay(&second, &order, "unknown", &again).await;
            let calls = [&authorization, &again].map(|a| scene.chain.transfer_call(a));
            scene.chain.batch(calls.to_vec()).await;
            twice.push((id, second, order));
        }
        3 => {
            scene.chain.cancel(&authorization).await;
            ending.failed(&id, &order);
        }
        4 => {
            let elsewhere = crate::support::anvil::Authorization { to: ELSEWHERE, ..authorization };
            scene.land(&elsewhere).await;
            ending.failed(&id, &order);
            ending.flags.insert(format!("nonce_used_elsewhere:{id}"));
        }
        5 => {
            // The gateway gave up the order, and its stock, before the money came.
            let canceled = OrderUpdate {
                status: Some("canceled".to_owned()),
                release_stock: true,
                ..OrderUpdate::default()
            };
            scene.gateway.update_order(&order, &canceled).await.unwrap();
            scene.land(&authorization).await;
            ending.order(&order, "canceled", None, "released");
            ending.owed(&id, &order, "late");
        }
        6 => {
            // One authorization was taken for two orders: the older row has it.
            let (other, other_order) = (format!("{id}-reused"), format!("{order}-reused"));
            scene.order(&other_order).await;
            scene.pay(&other, &other_order, "unknown", &authorization).await;
            scene.land(&authorization).await;
            ending.paid(&id, &order);
            ending.failed(&other, &other_order);
            ending.flags.insert(format!("authorization_reused:{other}"));
        }
        _ => ending.failed(&id, &order),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_random_moments_under_load_every_effect_happens_once_on_postgres() {
    killed_at_random_moments_under_load(&Scene::start().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_random_moments_under_load_every_effect_happens_once_on_sqlite() {
    killed_at_random_moments_under_load(&Scene::on_sqlite().await).await;
}

async fn killed_at_random_moments_under_load(scene: &Scene) {
    let seed = seed();
    let kills = from_environment("RECONCILED_TEST_KILLS").unwrap_or(KILLS);
    eprintln!("RECONCILED_TEST_SEED={seed} RECONCILED_TEST_KILLS={kills}");
    scene.gateway.put_stock("thing", 0).await.unwrap();
    let settings = scene.settings().set("policy", "early_failure", "true");
    // Small batches: more moments between two steps.
    let settings = settings.set("checks", "batch_max", "7").set("reconcile", "page_size", "11");
    let config = settings.write();

    let mut ending = Ending::default();
    let mut paid_twice = PaidTwice::new();
    let killed_all = AtomicBool::new(false);
    let load = async {
        let mut dice = Dice::new(seed);
        for n in 0..FATES_MAX {
            if n >= FATES && killed_all.load(Ordering::Relaxed) {
                break;
            }
            play(scene, n, &mut dice, &mut ending, &mut paid_twice).await;
        }
    };
    let killer = async {
        let mut dice = Dice::new(!seed);
        for _ in 0..kills {
            let mut daemon = config.start().await;
            tokio::time::sleep(Duration::from_millis(dice.roll(LIFE_MS))).await;
            daemon.kill9();
        }
        killed_all.store(true, Ordering::Relaxed);
    };
    tokio::join!(load, killer);
    let by_the_killed = scene.gateway.count("{resolutions}").await.unwrap();
    assert!(by_the_killed > 0, "none of the killed got anything done: seed {seed}");

    // Whatever was left in the middle is taken up again.
    let mut daemon = config.start_ready().await;
    scene.later(2 * VALID_FOR).await;
    // A watch that is not open yet is not closed either.
    let payments = scene.gateway.count("payments").await.unwrap();
    eventually("every payment is followed", async || {
        let watches = scene.gateway.count("{watches}").await.unwrap();
        if watches == payments { Ok(()) } else { Err(watches.to_string()) }
    })
    .await;
    scene.all_closed().await;
    let seen = Ending::seen(scene).await;
    for (one, other, order) in paid_twice {
        let is_first = seen.orders[&order].1.as_ref() == Some(&one);
        let (pays, owed) = if is_first { (one, other) } else { (other, one) };
        ending.paid(&pays, &order);
        ending.owed(&owed, &order, "duplicate");
    }
    ending.events.sort();
    assert_eq!(seen, ending, "seed {seed}");
    // One final word per payment, beside what was confirmed later.
    let twice = "SELECT payment_id, CAST(count(*) AS TEXT) FROM {resolutions} \
                 WHERE outcome <> 'confirmed' GROUP BY 1 HAVING count(*) > 1";
    assert_eq!(scene.counts(twice).await, BTreeMap::new(), "seed {seed}");
    scene.assert_conserved().await;
    assert_eq!(daemon.sigterm().await.0, 0);
}
