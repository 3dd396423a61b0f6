/* The link protocol of r2ccl: attempts, fences and the reuse of slots, on one-sided writes.
 *
 * A sender writes messages 0, 1, ... into slots of the receiver's memory: message m into slot
 * m mod SLOTS, 1 chunk a message.  A rail is a queue pair.  Its attempts land in order.  A landing
 * attempt writes the memory, whatever the receiver's software knows or does.  Names are those of
 * csrc/link.  README.md describes the scope of the model and how to run the searches.
 *
 * A d_step is a single step of a side.  Any other step may happen between two steps.  The names in
 * #ifdef are variants, each broken in a single respect. */

#define RAILS 2 /* must be 2: "1 - rail" below is the other rail */
#define SLOTS 2
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef DEPTH
#define DEPTH 3 /* length of a rail's queues; a full send queue holds up posting */
#endif

#define SENDER 0
#define RECEIVER 1
#define AT(a, b) ((a) * 2 + (b)) /* (side, rail) or (rail, slot) */
#define NAME(side) (side == SENDER -> 'S' : 'R')
#define NONE 7  /* no rail, no message */
#define FREED 6 /* PATH_ACK_IS_DELIVERY only: the bytes are gone and cannot be replayed */

/* States of a rail.  PROBATION is part of the step that connects again.  SUSPECT is the same as UP:
 * any undelivered message may be hedged at any time. */
mtype = { UP, DOWN, FENCING, CONNECTING };

/* --- state ------------------------------------------------------------------------------------ */

mtype state[2 * RAILS] = UP; /* of each rail, by side */
byte epoch[RAILS];           /* a single number: both sides open an epoch in the same step */
chan posted[RAILS] = [DEPTH] of { byte };  /* attempts in flight, by message */
chan unacked[RAILS] = [DEPTH] of { byte }; /* landed attempts whose path ack is in flight */
byte faults;                               /* faults left */

byte next;                    /* sender: number of messages opened */
byte delivered;               /* sender: messages with a delivery ack, which ends replay */
byte credit;                  /* sender: messages read by the receiver, as far as known */
byte last_rail[SLOTS] = NONE; /* sender: last rail of the slot's message; NONE: post again */
bit hedged[SLOTS];            /* sender: the message's last attempt is a hedge; no further hedge */
bit again[SLOTS];             /* sender: the message has more than one attempt */

byte memory[SLOTS] = NONE;     /* receiver: message whose bytes lie in the slot */
bit completion[RAILS * SLOTS]; /* receiver: completion of the current message, not polled yet */
bit arrived[SLOTS];            /* receiver: the slot's current message was counted */
byte consumed;                 /* receiver: messages read to the end */
bit reading;                   /* receiver: message `consumed` is being read */

byte m;                                         /* scratch of a step; 0 between steps */
bit stale_write, early_write, wrong_bytes, stuck; /* asserted to stay 0 */

/* CURRENT: the message that a slot serves now.  ARRIVED: the receiver's cumulative count of arrived
 * messages. */
#define CURRENT(slot) (consumed + ((slot) + SLOTS * MESSAGES - consumed) % SLOTS)
#define ARRIVED \
  (consumed + (arrived[consumed % SLOTS] -> 1 + arrived[(consumed + 1) % SLOTS] : 0))

/* --- rails fail, are fenced and come back ----------------------------------------------------- */

#define IS_FENCED(side, rail) \
  (state[AT(side, rail)] == FENCING || state[AT(side, rail)] == CONNECTING)

/* RAIL_DOWN and FENCED travel on the other rail or the control channel.  Copies are repeated, and
 * may be lost, be late and overtake each other.  The model therefore lets each frame ever sent
 * arrive at any time, any number of times.  Both sides have sent both frames of an ended epoch. */
#define DOWN_SENT(side, rail, of) ((of) < epoch[rail] || state[AT(side, rail)] != UP)
#ifdef FENCED_BEFORE_FLUSH
#define FENCED_SENT(side, rail, of) DOWN_SENT(side, rail, of)
#else
#define FENCED_SENT(side, rail, of) ((of) < epoch[rail] || IS_FENCED(side, rail))
#endif

/* A frame about another epoch than the present epoch changes nothing. */
#define COUNTS(rail, of) ((of) == epoch[rail])
#ifdef OLD_FENCE_COUNTS
#define FENCE_COUNTS(rail, of) true
#else
#define FENCE_COUNTS(rail, of) COUNTS(rail, of)
#endif
#define COMES(sent, counts, side, rail) \
  ((sent(side, rail, epoch[rail]) && counts(rail, epoch[rail])) || \
   (epoch[rail] > 0 && sent(side, rail, epoch[rail] - 1) && counts(rail, epoch[rail] - 1)))

inline rail_failed(side, rail) {
  printf("%c: rail %d DOWN\n", NAME(side), rail);
  state[AT(side, rail)] = DOWN;
  if
  :: side == SENDER -> /* messages last posted on this rail are posted again, path-acked or not */
     if :: last_rail[0] == rail -> last_rail[0] = NONE; hedged[0] = 0 :: else fi;
     if :: last_rail[1] == rail -> last_rail[1] = NONE; hedged[1] = 0 :: else fi
  :: else
  fi
}

inline rail_closed(side, rail) { /* from here on FENCED is sent */
  printf("%c: rail %d FENCING\n", NAME(side), rail);
  state[AT(side, rail)] = FENCING
}

/* The sender knows that both sides fenced the epoch, and waits for none of its attempts. */
inline resolve_epoch(rail) {
  do :: unacked[rail]?_ :: empty(unacked[rail]) -> break od;
  if
  :: IS_FENCED(RECEIVER, rail) -> do :: posted[rail]?_ :: empty(posted[rail]) -> break od
  :: else /* a broken variant: attempts in flight stay in flight */
  fi
}

#define COMPLETIONS(rail) (completion[AT(rail, 0)] || completion[AT(rail, 1)])

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
  :: d_step { state[AT(side, rail)] == UP && COMES(DOWN_SENT, COUNTS, 1 - side, rail) ->
       rail_failed(side, rail)
     }
  /* The local fence: the queue pair is in ERR and flushed.  The sender gets no further path ack of
   * the queue pair.  At the receiver nothing lands any more, and all completions are polled. */
  :: d_step { state[AT(side, rail)] == DOWN && (side == SENDER || !COMPLETIONS(rail)) ->
       rail_closed(side, rail)
     }
  /* The device is gone.  This is a fence too, but the last completions are lost. */
  :: d_step { state[AT(side, rail)] == DOWN && side == RECEIVER && COMPLETIONS(rail) ->
       printf("completions of rail %d lost\n", rail);
       completion[AT(rail, 0)] = 0;
       completion[AT(rail, 1)] = 0;
       rail_closed(side, rail)
     }
  :: d_step { state[AT(side, rail)] == FENCING &&
              COMES(FENCED_SENT, FENCE_COUNTS, 1 - side, rail) ->
       printf("%c: rail %d CONNECTING\n", NAME(side), rail);
       state[AT(side, rail)] = CONNECTING;
       if :: side == SENDER -> resolve_epoch(rail) :: else fi
     }
  od
}

/* --- sending ---------------------------------------------------------------------------------- */

/* An attempt is resolved when the path acknowledged it or both sides fenced its epoch. */
#ifdef OWN_FENCE_RESOLVES
#define EPOCH_RESOLVED(rail) IS_FENCED(SENDER, rail)
#else
#define EPOCH_RESOLVED(rail) (state[AT(SENDER, rail)] == CONNECTING)
#endif
#define UNRESOLVED(rail, m) \
  (!EPOCH_RESOLVED(rail) && (posted[rail]??[eval(m)] || unacked[rail]??[eval(m)]))

/* The reuse rule: credit, and every attempt of the slot's last message resolved.  A delivered
 * message's only attempt has landed, and is therefore resolved. */
#ifdef NO_REUSE_RULE
#define RESOLVED(m) true
#else
#define RESOLVED(m) (!again[(m) % SLOTS] || !(UNRESOLVED(0, m) || UNRESOLVED(1, m)))
#endif
#define MAY_OPEN \
  (next < MESSAGES && next < credit + SLOTS && (next < SLOTS || RESOLVED(next - SLOTS)))
/* A message whose slot is not used again needs no account of its attempts. */
#define SLOT_USED_AGAIN(m) ((m) + SLOTS < MESSAGES)

#define MAY_POST(rail) (state[AT(SENDER, rail)] == UP && nfull(posted[rail]))
/* Replay and hedge concern the undelivered messages `delivered` and `delivered + 1`. */
#define MAY_REPLAY(m) ((m) < next && last_rail[(m) % SLOTS] == NONE)
#define MAY_HEDGE(m, rail) \
  ((m) < next && last_rail[(m) % SLOTS] == 1 - rail && !hedged[(m) % SLOTS])

inline post(m, rail, is_again, is_hedge) {
  printf("message %d on rail %d\n", m, rail);
  again[(m) % SLOTS] = is_again && SLOT_USED_AGAIN(m);
  hedged[(m) % SLOTS] = is_hedge;
  last_rail[(m) % SLOTS] = rail;
  posted[rail]!(m)
}
inline replay(m, rail) { printf("S: replay of "); post(m, rail, 1, 0) }
inline hedge(m, rail) { printf("S: hedge of "); post(m, rail, 1, 1) }

/* The sender's use of a rail: posts, replays, hedges, path acks and reconnection. */
proctype Sender(byte rail) {
end:
  do
  :: d_step { MAY_POST(rail) && MAY_OPEN ->
       printf("S: ");
       post(next, rail, 0, 0);
       next++
     }
  :: d_step { MAY_POST(rail) && MAY_REPLAY(delivered) -> replay(delivered, rail) }
  :: d_step { MAY_POST(rail) && MAY_REPLAY(delivered + 1) -> replay(delivered + 1, rail) }
  :: d_step { MAY_POST(rail) && MAY_HEDGE(delivered, rail) -> hedge(delivered, rail) }
  :: d_step { MAY_POST(rail) && MAY_HEDGE(delivered + 1, rail) -> hedge(delivered + 1, rail) }
  /* A path ack arrives. */
  :: d_step { nempty(unacked[rail]) && !IS_FENCED(SENDER, rail) ->
       unacked[rail]?m;
       printf("S: path ack of message %d on rail %d\n", m, rail);
#ifdef PATH_ACK_IS_DELIVERY
       if :: m >= delivered -> last_rail[m % SLOTS] = FREED :: else fi;
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

/* Delivery acks and credits.  Both are cumulative and repeated on all rails; a frame may be late or
 * lost.  The sender may therefore learn any count reached by the receiver, at any time with a rail
 * in state UP.  A lost frame is a count learned later. */
#define HEARS (state[AT(SENDER, 0)] == UP || state[AT(SENDER, 1)] == UP)
proctype Acks() {
end:
  do
  :: d_step { HEARS && delivered < ARRIVED ->
       last_rail[delivered % SLOTS] = NONE;
       hedged[delivered % SLOTS] = 0;
       delivered++;
#ifdef DELIVERY_IS_CREDIT
       credit = delivered;
#endif
       printf("S: delivered %d, credit %d\n", delivered, credit)
     }
  :: d_step { HEARS && credit < consumed && credit < delivered ->
       credit++;
       printf("S: delivered %d, credit %d\n", delivered, credit)
     }
  od
}

/* --- receiving -------------------------------------------------------------------------------- */

#ifdef NUMBER_IGNORED
#define WANTED(m) true
#else
#define WANTED(m) (m == CURRENT(m % SLOTS) && !arrived[m % SLOTS])
#endif

/* The NIC writes an attempt into its slot.  Software has no influence. */
inline land(rail) {
  posted[rail]?m;
  printf("rail %d writes message %d\n", rail, m);
  /* stale: over the message of the slot's reuse; early: over a message not read to its end. */
  stale_write = memory[m % SLOTS] != NONE && m < memory[m % SLOTS];
  early_write = m > memory[m % SLOTS] && memory[m % SLOTS] >= consumed;
  assert(!stale_write);
  assert(!early_write);
  memory[m % SLOTS] = m;
  if :: SLOT_USED_AGAIN(m) -> unacked[rail]!m :: else fi;
  /* The completion carries slot and number.  A completion of a message counted before would be
   * discarded at any poll, so the model leaves this completion out. */
  if :: WANTED(m) -> completion[AT(rail, m % SLOTS)] = 1 :: else fi;
  m = 0
}

inline poll(slot, rail) {
  printf("R: completion in slot %d on rail %d\n", slot, rail);
  completion[AT(rail, slot)] = 0;
#ifndef NUMBER_IGNORED
  completion[AT(1 - rail, slot)] = 0; /* a poll would discard this */
#endif
  arrived[slot] = 1
}

/* The receiver's view of a rail: attempts land, completions are polled. */
#define MAY_LAND(rail) (nempty(posted[rail]) && nfull(unacked[rail]) && !IS_FENCED(RECEIVER, rail))
proctype Receiver(byte rail) {
end:
  do
  :: d_step { MAY_LAND(rail) && state[AT(SENDER, rail)] == UP -> land(rail) }
  /* Late: the sender gave up the rail, and the receiver has not fenced the rail yet. */
  :: d_step { MAY_LAND(rail) && state[AT(SENDER, rail)] != UP -> printf("late: "); land(rail) }
  /* Completions are polled at any time, in any order. */
  :: d_step { completion[AT(rail, 0)] -> poll(0, rail) }
  :: d_step { completion[AT(rail, 1)] -> poll(1, rail) }
  od
}

#define FINISHED \
  (consumed == MESSAGES && delivered == MESSAGES && credit == MESSAGES && \
   state[0] == UP && state[1] == UP && state[2] == UP && state[3] == UP && \
   len(posted[0]) + len(posted[1]) + len(unacked[0]) + len(unacked[1]) == 0)

/* The collective that reads the messages.  A read takes time: it begins and ends in two steps. */
proctype Reader() {
  do
  :: d_step { arrived[consumed % SLOTS] && !reading ->
       printf("R: begins to read message %d\n", consumed);
       wrong_bytes = memory[consumed % SLOTS] != consumed;
       assert(!wrong_bytes);
       reading = 1
     }
  :: d_step { reading ->
       printf("R: has read message %d\n", consumed);
       wrong_bytes = memory[consumed % SLOTS] != consumed;
       assert(!wrong_bytes);
       reading = 0;
       arrived[consumed % SLOTS] = 0;
       consumed++
     }
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
    run Sender(0); run Sender(1);
    run Receiver(0); run Receiver(1);
    run End(SENDER, 0); run End(SENDER, 1); run End(RECEIVER, 0); run End(RECEIVER, 1);
    run Acks(); run Reader()
  }
}
