//! The plan of a round: how many intents of which lanes are wanted. Pure.
//!
//! Tenants take turns, one intent each, until the room is used up; a tenant's lanes take turns in
//! the same way. Whoever was served last stands at the end of the next round's line, so that
//! nobody starves however small the room is.

use std::collections::HashMap;

use crate::domain::intent::Destination;
use crate::store::outbox::{Lane, LaneWish};

/// The most intents of one lane that one round asks for.
pub const LANE_MAX: u32 = 64;

/// How much room there is.
pub struct Rooms<'a> {
    /// In all.
    pub total: usize,
    /// For a tenant, by name, principals together.
    pub tenant: &'a dyn Fn(&str) -> usize,
    /// For a destination: zero when it is shut.
    pub destination: &'a dyn Fn(&Destination) -> usize,
}

/// Whose turn it is.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// The tenant that was served last.
    after: Option<String>,
    /// Counts rounds: where a tenant's lanes begin.
    round: usize,
}

/// A tenant's lanes and how much of each is wanted.
struct Queue<'a> {
    name: &'a str,
    lanes: Vec<&'a Lane>,
    wanted: Vec<u32>,
    /// The lane to look at first.
    next: usize,
}

/// Shares the room out.
#[must_use]
pub fn plan(lanes: &[Lane], rooms: &Rooms<'_>, turn: &mut Turn) -> Vec<LaneWish> {
    let mut queues = queues(lanes, turn);
    let mut tenants: HashMap<&str, usize> = HashMap::new();
    let mut destinations: HashMap<&Destination, usize> = HashMap::new();
    let mut total = rooms.total;
    let mut served = true;
    while served && total > 0 {
        served = false;
        for queue in &mut queues {
            let tenant = tenants
                .entry(queue.name)
                .or_insert_with(|| (rooms.tenant)(queue.name));
            if total == 0 || *tenant == 0 {
                continue;
            }
            if queue.take(&mut destinations, rooms.destination) {
                (total, *tenant, served) = (total - 1, *tenant - 1, true);
                turn.after = Some(queue.name.to_owned());
            }
        }
    }
    turn.round = turn.round.wrapping_add(1);
    queues.into_iter().flat_map(Queue::wishes).collect()
}

/// Tenants in the order of their turns.
fn queues<'a>(lanes: &'a [Lane], turn: &Turn) -> Vec<Queue<'a>> {
    let mut queues: Vec<Queue<'a>> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for lane in lanes {
        let name = lane.tenant.tenant();
        let place = *places.entry(name).or_insert_with(|| {
            queues.push(Queue {
                name,
                lanes: Vec::new(),
                wanted: Vec::new(),
                next: 0,
            });
            queues.len() - 1
        });
        queues[place].lanes.push(lane);
        queues[place].wanted.push(0);
    }
    for queue in &mut queues {
        queue.next = turn.round % queue.lanes.len();
    }
    let after = turn.after.as_deref();
    queues.sort_by_key(|queue| (after.is_some_and(|after| queue.name <= after), queue.name));
    queues
}

impl<'a> Queue<'a> {
    /// One more of the next lane that has room.
    fn take(
        &mut self,
        rooms: &mut HashMap<&'a Destination, usize>,
        room: &dyn Fn(&Destination) -> usize,
    ) -> bool {
        let count = self.lanes.len();
        for step in 0..count {
            let index = (self.next + step) % count;
            let destination = &self.lanes[index].destination;
            let left = rooms
                .entry(destination)
                .or_insert_with(|| room(destination));
            if *left > 0 && self.wanted[index] < LANE_MAX {
                *left -= 1;
                self.wanted[index] += 1;
                self.next = (index + 1) % count;
                return true;
            }
        }
        false
    }

    fn wishes(self) -> impl Iterator<Item = LaneWish> {
        let wanted = self.lanes.into_iter().zip(self.wanted);
        wanted
            .filter(|(_, limit)| *limit > 0)
            .map(|(lane, limit)| LaneWish {
                lane: lane.clone(),
                limit,
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::scope::TenantScope;

    fn lane(tenant: &str, destination: &str) -> Lane {
        Lane {
            tenant: TenantScope::stored(tenant),
            destination: Destination(destination.to_owned()),
        }
    }

    fn planned(lanes: &[Lane], total: usize, each: usize, turn: &mut Turn) -> Vec<(String, u32)> {
        let rooms = Rooms {
            total,
            tenant: &|_| usize::MAX,
            destination: &|destination| if destination.0 == "shut" { 0 } else { each },
        };
        let wishes = plan(lanes, &rooms, turn).into_iter();
        wishes
            .map(|wish| {
                (
                    format!("{} {}", wish.lane.tenant, wish.lane.destination.0),
                    wish.limit,
                )
            })
            .collect()
    }

    fn told(lines: &[(&str, u32)]) -> Vec<(String, u32)> {
        lines
            .iter()
            .map(|(lane, n)| ((*lane).to_owned(), *n))
            .collect()
    }

    #[test]
    fn tenants_share_a_destination_evenly_whatever_their_backlogs() {
        let lanes = [lane("a", "x"), lane("b", "x"), lane("c", "x")];
        let wishes = planned(&lanes, 100, 8, &mut Turn::default());
        assert_eq!(wishes, told(&[("a x", 3), ("b x", 3), ("c x", 2)]));
    }

    #[test]
    fn whoever_came_short_is_first_in_the_next_round() {
        let lanes = [lane("a", "x"), lane("b", "x"), lane("c", "x")];
        let mut turn = Turn::default();
        let firsts: Vec<_> = (0..4)
            .flat_map(|_| planned(&lanes, 1, 8, &mut turn))
            .map(|(lane, _)| lane)
            .collect();
        assert_eq!(firsts, ["a x", "b x", "c x", "a x"]);
    }

    #[test]
    fn a_shut_destination_takes_no_room_from_the_others_of_its_tenant() {
        let lanes = [lane("a", "shut"), lane("a", "x"), lane("b", "shut")];
        let wishes = planned(&lanes, 4, 8, &mut Turn::default());
        assert_eq!(wishes, told(&[("a x", 4)]));
    }

    #[test]
    fn the_lanes_of_a_tenant_take_turns() {
        let lanes = [lane("a", "x"), lane("a", "y"), lane("a", "z")];
        let mut turn = Turn::default();
        let firsts: Vec<_> = (0..3)
            .flat_map(|_| planned(&lanes, 1, 1, &mut turn))
            .map(|(lane, _)| lane)
            .collect();
        assert_eq!(firsts, ["a x", "a y", "a z"]);
    }

    #[test]
    fn principals_of_a_tenant_share_its_turn() {
        let lanes = [
            lane("a 1", "x"),
            lane("a 2", "x"),
            lane("a 3", "x"),
            lane("b", "x"),
        ];
        let wishes = planned(&lanes, 6, 9, &mut Turn::default());
        assert_eq!(wishes.iter().map(|(_, n)| n).sum::<u32>(), 6);
        assert!(wishes.contains(&("b x".to_owned(), 3)), "{wishes:?}");
    }

    proptest! {
        #[test]
        fn no_room_is_ever_overdrawn_and_none_is_left_where_somebody_wants_it(
            names in proptest::collection::btree_set(("[abc]", "[xyz]"), 1..9),
            (total, tenant_room, destination_room) in (0usize..12, 0usize..5, 0usize..5),
        ) {
            let lanes: Vec<Lane> = names.iter().map(|(a, b)| lane(a, b)).collect();
            let rooms = Rooms {
                total,
                tenant: &|_| tenant_room,
                destination: &|_| destination_room,
            };
            let wishes = plan(&lanes, &rooms, &mut Turn::default());
            let sum = |keep: &dyn Fn(&Lane) -> bool| -> usize {
                let kept = wishes.iter().filter(|wish| keep(&wish.lane));
                kept.map(|wish| wish.limit as usize).sum()
            };
            prop_assert!(sum(&|_| true) <= total);
            for lane in &lanes {
                let of_tenant = sum(&|other| other.tenant == lane.tenant);
                let of_destination = sum(&|other| other.destination == lane.destination);
                prop_assert!(of_tenant <= tenant_room && of_destination <= destination_room);
                let full = sum(&|_| true) == total
                    || of_tenant == tenant_room
                    || of_destination == destination_room;
                prop_assert!(full, "{lane:?} could have had more");
            }
        }
    }
}
