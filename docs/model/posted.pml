/* Posted receives of r2ccl: one permission per attempt, on one-sided writes into memory of callers.
 *
 * A receiver posts receives 0, 1, ..., each with memory of a caller.  ROOM(m, try) permits a single
 * posting of message m on one epoch of one rail.  A rail is a queue pair.  Its attempts land in
 * order.  A landing attempt writes the memory, whatever the receiver's software knows or does.
 * Rails, faults and fences are those of link.pml.  README.md describes the scope of the model.
 *
 * A d_step is a single step of a side.  Any other step may happen between two steps.  The names in
 * #ifdef are variants, each broken in a single respect. */

#define RAILS 2 /* must be 2: "1 - rail" below is the other rail */
#ifndef MESSAGES
#define MESSAGES 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#define DEPTH 2           /* length of a rail's queues; a full queue holds up posting */
#define TRIES (FAULTS + 2) /* tries count from 1; each further try follows a fault */

#define SENDER 0
#define RECEIVER 1
#define AT(a, b) ((a) * 2 + (b)) /* (side, rail) */
#define NAME(side) (side == SENDER -> 'S' : 'R')
#define OF(m, try) ((m) * TRIES + (try))

/* States of a rail.  PROBATION is part of the step that connects again.  SUSPECT is the same as UP:
 * the sender may suspect any rail at any time. */
mtype = { UP, DOWN, FENCING, CONNECTING };

/* --- state ------------------------------------------------------------------------------------ */

mtype state[2 * RAILS] = UP; /* of each rail, by side */
byte epoch[RAILS];           /* a single number: both sides open an epoch in the same step */
chan posted[RAILS] = [DEPTH] of { byte, byte }; /* message and try, not read by the own NIC yet */
chan flying[RAILS] = [DEPTH] of { byte, byte }; /* read by the own NIC, not landed yet */
chan unacked[RAILS] = [DEPTH] of { byte };      /* landed messages whose path ack is in flight */
byte faults;                                    /* faults and suspicions left */

byte try[MESSAGES];           /* receiver: the last try permitted; 0: none */
byte room[MESSAGES * TRIES];  /* receiver: rail and epoch that ROOM(m, try) names */
bit due[MESSAGES] = 1;        /* receiver: the next ROOM of the message is due */
byte completion[RAILS * MESSAGES]; /* receiver: try of a completion not polled yet; 0: none */
bit done[MESSAGES];           /* receiver: the memory is handed back to the caller */

byte known[MESSAGES]; /* sender: try of the last ROOM; 0: none */
byte used[MESSAGES];  /* sender: try of the last posting; 0: none */
byte asked[MESSAGES]; /* sender: try of the last NEED; 0: none */
bit freed[MESSAGES];  /* sender: the memory is handed back to the caller */
#ifdef REPLAY_WITHOUT_ROOM
bit replayed[MESSAGES];
#endif
#ifdef ROOM_NOT_REPEATED
byte carrier[MESSAGES]; /* rail that carries the last ROOM */
bit lost[MESSAGES];     /* this rail was lost before the ROOM arrived */
#endif

byte m, t;                          /* scratch of a step; 0 between steps */
bit late_write, late_read, stuck;   /* asserted to stay 0 */

#define PERMIT(rail) (epoch[rail] * RAILS + (rail)) /* the present epoch of a rail */
#define PERMITTED(m) room[OF(m, try[m])]

/* --- rails fail, are fenced and come back ----------------------------------------------------- */

#define IS_FENCED(side, rail) \
  (state[AT(side, rail)] == FENCING || state[AT(side, rail)] == CONNECTING)

/* As in link.pml, each RAIL_DOWN and FENCED ever sent may arrive at any time, any number of times.
 * Frames about ended epochs change nothing and are left out. */
#define DOWN_SENT(side, rail) (state[AT(side, rail)] != UP)

/* The epoch of the rail has ended at the receiver: its unfinished messages need another ROOM. */
inline revoke(rail) {
  if :: try[0] > 0 && !done[0] && PERMITTED(0) == PERMIT(rail) -> due[0] = 1 :: else fi;
#if MESSAGES > 1
  if :: try[1] > 0 && !done[1] && PERMITTED(1) == PERMIT(rail) -> due[1] = 1 :: else fi
#endif
}

inline rail_failed(side, rail) {
  printf("%c: rail %d DOWN\n", NAME(side), rail);
  state[AT(side, rail)] = DOWN;
#ifdef ROOM_NOT_REPEATED
  if :: carrier[0] == rail && known[0] < try[0] -> lost[0] = 1 :: else fi;
#if MESSAGES > 1
  if :: carrier[1] == rail && known[1] < try[1] -> lost[1] = 1 :: else fi;
#endif
#endif
#ifdef ROOM_BEFORE_FENCE
  if :: side == RECEIVER -> revoke(rail) :: else fi
#endif
}

inline rail_closed(side, rail) { /* from here on FENCED is sent */
  printf("%c: rail %d FENCING\n", NAME(side), rail);
  state[AT(side, rail)] = FENCING;
  if
  :: side == RECEIVER -> revoke(rail)
  :: else -> /* the own NIC reads nothing of this epoch any more */
     do :: posted[rail]?_, _ :: empty(posted[rail]) -> break od
  fi
}

/* The sender knows that both sides fenced the epoch. */
inline resolve_epoch(rail) {
  do :: unacked[rail]?_ :: empty(unacked[rail]) -> break od;
  do :: flying[rail]?_, _ :: empty(flying[rail]) -> break od
}

#if MESSAGES > 1
#define COMPLETIONS(rail) (completion[OF_RAIL(rail, 0)] > 0 || completion[OF_RAIL(rail, 1)] > 0)
#else
#define COMPLETIONS(rail) (completion[OF_RAIL(rail, 0)] > 0)
#endif
#define OF_RAIL(rail, m) ((rail) * MESSAGES + (m))

/* An end of a rail: faults, notices and the fence. */
proctype End(byte side, rail) {
end:
  do
  /* A fault, noticed first by this side. */
  :: d_step { faults > 0 && state[AT(side, rail)] == UP ->
       faults--;
       rail_failed(side, rail)
     }
  /* RAIL_DOWN arrives, or a FENCED that overtook RAIL_DOWN. */
  :: d_step { state[AT(side, rail)] == UP && DOWN_SENT(1 - side, rail) ->
       rail_failed(side, rail)
     }
  /* The local fence: the queue pair is in ERR and flushed.  At the receiver nothing lands any more,
   * and all completions are polled. */
  :: d_step { state[AT(side, rail)] == DOWN && (side == SENDER || !COMPLETIONS(rail)) ->
       rail_closed(side, rail)
     }
  /* The device is gone.  This is a fence too, but the last completions are lost. */
  :: d_step { state[AT(side, rail)] == DOWN && side == RECEIVER && COMPLETIONS(rail) ->
       printf("completions of rail %d lost\n", rail);
       completion[OF_RAIL(rail, 0)] = 0;
#if MESSAGES > 1
       completion[OF_RAIL(rail, 1)] = 0;
#endif
       rail_closed(side, rail)
     }
  :: d_step { state[AT(side, rail)] == FENCING && IS_FENCED(1 - side, rail) ->
       printf("%c: rail %d CONNECTING\n", NAME(side), rail);
       state[AT(side, rail)] = CONNECTING;
       if :: side == SENDER -> resolve_epoch(rail) :: else fi
     }
  od
}

/* --- receiving -------------------------------------------------------------------------------- */

inline grant(m, rail) {
  try[m]++;
  room[OF(m, try[m])] = PERMIT(rail);
  due[m] = 0;
#ifdef ROOM_NOT_REPEATED
  carrier[m] = (state[AT(RECEIVER, 1 - rail)] == UP -> 1 - rail : rail);
  lost[m] = 0;
#endif
  printf("R: room for message %d, try %d, on rail %d\n", m, try[m], rail)
}

inline poll(m, rail) {
  if
  :: completion[OF_RAIL(rail, m)] == try[m] ->
     printf("R: message %d done by rail %d\n", m, rail);
     done[m] = 1;
     due[m] = 0
  :: else
  fi;
  completion[OF_RAIL(rail, m)] = 0
}

/* NEED for an older try changes nothing: the answer is the present ROOM. */
#ifdef OLD_TRY_ANSWERED
#define NEED_COUNTS(m) (asked[m] > 0 && asked[m] <= try[m])
#else
#define NEED_COUNTS(m) (asked[m] > 0 && asked[m] == try[m])
#endif
#define TRIES_LEFT(m) (try[m] + 1 < TRIES)

/* The receiver's care of a message: permissions, questions, completions. */
proctype Receive(byte n) {
end:
  do
  :: d_step { due[n] && TRIES_LEFT(n) && state[AT(RECEIVER, 0)] == UP -> grant(n, 0) }
  :: d_step { due[n] && TRIES_LEFT(n) && state[AT(RECEIVER, 1)] == UP -> grant(n, 1) }
  /* NEED arrives for the present try, and nothing has arrived by this try. */
  :: d_step { NEED_COUNTS(n) && !done[n] && !due[n] && PERMITTED(n) == PERMIT(0) &&
              state[AT(RECEIVER, 0)] == UP ->
       printf("R: need of message %d\n", n);
#ifdef OLD_TRY_ANSWERED
       if :: asked[n] < try[n] -> due[n] = 1 :: else -> rail_failed(RECEIVER, 0) fi
#else
       rail_failed(RECEIVER, 0)
#endif
     }
  :: d_step { NEED_COUNTS(n) && !done[n] && !due[n] && PERMITTED(n) == PERMIT(1) &&
              state[AT(RECEIVER, 1)] == UP ->
       printf("R: need of message %d\n", n);
#ifdef OLD_TRY_ANSWERED
       if :: asked[n] < try[n] -> due[n] = 1 :: else -> rail_failed(RECEIVER, 1) fi
#else
       rail_failed(RECEIVER, 1)
#endif
     }
  /* Completions are polled at any time, in any order.  The caller gets the memory back at once. */
  :: d_step { completion[OF_RAIL(0, n)] > 0 -> poll(n, 0) }
  :: d_step { completion[OF_RAIL(1, n)] > 0 -> poll(n, 1) }
  od
}

/* --- sending ---------------------------------------------------------------------------------- */

/* Frames of the receiver travel on any rail, and are repeated.  They may be late or lost. */
#define HEARS (state[AT(SENDER, 0)] == UP || state[AT(SENDER, 1)] == UP)
#ifdef ROOM_NOT_REPEATED
#define ARRIVES(m) (!lost[m])
#else
#define ARRIVES(m) true
#endif
#ifdef OLD_EPOCH_COUNTS
#define ROOM_COUNTS(m, rail) (room[OF(m, known[m])] % RAILS == rail)
#else
#define ROOM_COUNTS(m, rail) (room[OF(m, known[m])] == PERMIT(rail))
#endif
#define MAY_POST(rail) (state[AT(SENDER, rail)] == UP && nfull(posted[rail]))
#define PERMIT_ENDED(m) \
  (!(ROOM_COUNTS(m, 0) && state[AT(SENDER, 0)] == UP) && \
   !(ROOM_COUNTS(m, 1) && state[AT(SENDER, 1)] == UP))

/* The own NIC may read the source again until the path ack or the own fence: a retransmission. */
#ifdef READ_NOT_AWAITED
#define READ_BY(rail, m) false
#else
#define READ_BY(rail, m) \
  (!IS_FENCED(SENDER, rail) && \
   (posted[rail]??[eval(m), _] || flying[rail]??[eval(m), _] || unacked[rail]??[eval(m)]))
#endif

inline post(m, rail) {
  used[m] = known[m];
  printf("S: message %d, try %d, on rail %d\n", m, used[m], rail);
  posted[rail]!m, used[m]
}

/* The sender's care of a message. */
proctype Send(byte n) {
end:
  do
  /* ROOM arrives: the last, or an earlier ROOM that is late. */
  :: d_step { HEARS && known[n] < try[n] && ARRIVES(n) -> known[n] = try[n] }
  :: d_step { HEARS && known[n] + 1 < try[n] -> known[n] = known[n] + 1 }
  :: d_step { known[n] > used[n] && !freed[n] && MAY_POST(0) && ROOM_COUNTS(n, 0) -> post(n, 0) }
  :: d_step { known[n] > used[n] && !freed[n] && MAY_POST(1) && ROOM_COUNTS(n, 1) -> post(n, 1) }
  /* The permitted rail is lost or suspected. */
  :: d_step { known[n] > asked[n] && !freed[n] && HEARS && PERMIT_ENDED(n) ->
       printf("S: need of message %d after try %d\n", n, known[n]);
       asked[n] = known[n]
     }
  :: d_step { used[n] > asked[n] && used[n] == known[n] && !freed[n] && HEARS && faults > 0 ->
       faults--;
       printf("S: need of message %d after try %d\n", n, known[n]);
       asked[n] = known[n]
     }
#ifdef REPLAY_WITHOUT_ROOM
  :: d_step { used[n] > 0 && used[n] == known[n] && !freed[n] && !replayed[n] && PERMIT_ENDED(n) &&
              MAY_POST(0) ->
       replayed[n] = 1;
       post(n, 0)
     }
  :: d_step { used[n] > 0 && used[n] == known[n] && !freed[n] && !replayed[n] && PERMIT_ENDED(n) &&
              MAY_POST(1) ->
       replayed[n] = 1;
       post(n, 1)
     }
#endif
  /* The delivery becomes known, and no own NIC can read the source any more. */
  :: d_step { done[n] && !freed[n] && HEARS && !READ_BY(0, n) && !READ_BY(1, n) ->
       printf("S: message %d done\n", n);
       freed[n] = 1
     }
  od
}

/* --- the wire --------------------------------------------------------------------------------- */

inline land(rail) {
  flying[rail]?m, t;
  printf("rail %d writes message %d, try %d\n", rail, m, t);
  late_write = done[m];
  assert(!late_write);
  unacked[rail]!m;
  /* A completion of an older try would be discarded at any poll, so the model leaves it out. */
  if :: t == try[m] -> completion[OF_RAIL(rail, m)] = t :: else fi;
  m = 0;
  t = 0
}

#define MAY_LAND(rail) (nempty(flying[rail]) && nfull(unacked[rail]) && !IS_FENCED(RECEIVER, rail))
proctype Wire(byte rail) {
end:
  do
  /* The own NIC reads the source of an attempt. */
  :: d_step { nempty(posted[rail]) && nfull(flying[rail]) && !IS_FENCED(SENDER, rail) ->
       posted[rail]?m, t;
       printf("S: rail %d reads message %d\n", rail, m);
       late_read = freed[m];
       assert(!late_read);
       flying[rail]!m, t;
       m = 0;
       t = 0
     }
  :: d_step { MAY_LAND(rail) && state[AT(SENDER, rail)] == UP -> land(rail) }
  /* Late: the sender gave up the rail, and the receiver has not fenced the rail yet. */
  :: d_step { MAY_LAND(rail) && state[AT(SENDER, rail)] != UP -> printf("late: "); land(rail) }
  /* A path ack arrives. */
  :: d_step { nempty(unacked[rail]) && !IS_FENCED(SENDER, rail) ->
       unacked[rail]?m;
       printf("S: path ack of message %d on rail %d\n", m, rail);
#ifdef PATH_ACK_ENDS_SEND
       if :: !READ_BY(0, m) && !READ_BY(1, m) -> freed[m] = 1 :: else fi;
#endif
       m = 0
     }
  /* Handshake and probation: each side knows that both sides fenced the last epoch. */
  :: d_step { state[AT(SENDER, rail)] == CONNECTING && state[AT(RECEIVER, rail)] == CONNECTING ->
       printf("rail %d UP again\n", rail);
       resolve_epoch(rail);
       epoch[rail]++;
       state[AT(SENDER, rail)] = UP;
       state[AT(RECEIVER, rail)] = UP
     }
  od
}

#if MESSAGES > 1
#define ALL(what) (what[0] && what[1])
#else
#define ALL(what) what[0]
#endif
#define FINISHED \
  (ALL(done) && ALL(freed) && \
   state[0] == UP && state[1] == UP && state[2] == UP && state[3] == UP && \
   len(posted[0]) + len(posted[1]) + len(flying[0]) + len(flying[1]) == 0)

proctype Judge() {
  do
  :: timeout -> /* no other step is possible */
     stuck = !(FINISHED);
     assert(!stuck);
     break
  od
}

/* Starts with any number of faults up to FAULTS.  Otherwise a leftover fault could hide a dead end,
 * since the fault would still be a possible step. */
init {
  atomic {
    select(faults : 0 .. FAULTS);
    run Receive(0); run Send(0);
#if MESSAGES > 1
    run Receive(1); run Send(1);
#endif
    run Wire(0); run Wire(1);
    run End(SENDER, 0); run End(SENDER, 1); run End(RECEIVER, 0); run End(RECEIVER, 1);
    run Judge()
  }
}
