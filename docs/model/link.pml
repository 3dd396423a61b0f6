/* The link protocol of r2ccl: attempts, fences and the reuse of slots, on one-sided writes.
 *
 * A sender writes messages 0, 1, ... into slots of the receiver's memory: message m into slot
 * m mod SLOTS, one chunk a message.  A rail is a queue pair.  Its attempts land in order, and one
 * that lands writes the memory whatever the receiver's software knows or does.  Names are those of
 * csrc/link.  README.md says what is modelled, what is not, and how to run this.
 *
 * A d_step is one step of one side; between any two steps anything else may happen.  The names in
 * #ifdef are variants, each broken in one respect. */

#define RAILS 2 /* "1 - rail" below counts on two */
#define SLOTS 2
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef DEPTH
#define DEPTH 3 /* of a rail's queues; a full send queue holds posting up */
#endif

#define SENDER 0
#define RECEIVER 1
#define AT(a, b) ((a) * 2 + (b)) /* (side, rail) or (rail, slot) */
#define NAME(side) (side == SENDER -> 'S' : 'R')
#define NONE 7  /* no rail, no message */
#define FREED 6 /* PATH_ACK_IS_DELIVERY only: the bytes are gone, nobody can replay them */

/* PROBATION is part of the step that connects again.  SUSPECT is not told from UP; instead any
 * message that is not delivered may be hedged at any time. */
mtype = { UP, DOWN, FENCING, CONNECTING };

/* --- state ------------------------------------------------------------------------------------ */

mtype state[2 * RAILS] = UP; /* of a rail, as each side sees it */
byte epoch[RAILS];           /* both sides open it in one step, so one number serves both */
chan posted[RAILS] = [DEPTH] of { byte };  /* attempts on their way, by their messages */
chan unacked[RAILS] = [DEPTH] of { byte }; /* attempts that landed, their path acks on their way */
byte faults;                               /* still to come */

byte next;                    /* sender: messages opened */
byte delivered;               /* sender: delivery ack, ends replay */
byte credit;                  /* sender: so many has the receiver read */
byte last_rail[SLOTS] = NONE; /* sender: of the slot's message; NONE: to be posted anew */
bit hedged[SLOTS];            /* sender: the message's last attempt has its hedge */
bit again[SLOTS];             /* sender: the message has more than one attempt */

byte memory[SLOTS] = NONE;     /* receiver: whose bytes lie in the slot */
bit completion[RAILS * SLOTS]; /* receiver: the slot's current message landed; not polled yet */
bit arrived[SLOTS];            /* receiver: the slot's current message is here */
byte consumed;                 /* receiver */
bit reading;                   /* receiver: message `consumed` is being read */

byte m;                                         /* scratch of one step; 0 between steps */
bit stale_write, early_write, wrong_bytes, stuck; /* what is asserted never to be */

/* The message that the slot is for now, and the count that the receiver acknowledges. */
#define CURRENT(slot) (consumed + ((slot) + SLOTS * MESSAGES - consumed) % SLOTS)
#define ARRIVED \
  (consumed + (arrived[consumed % SLOTS] -> 1 + arrived[(consumed + 1) % SLOTS] : 0))

/* --- rails fail, are fenced and come back ----------------------------------------------------- */

#define IS_FENCED(side, rail) \
  (state[AT(side, rail)] == FENCING || state[AT(side, rail)] == CONNECTING)

/* RAIL_DOWN and FENCED travel on the other rail or the control channel.  Copies may be lost, be
 * late and overtake each other, and are repeated: so each that was ever sent may arrive at any
 * time, any number of times.  Of an ended epoch both sides have sent both. */
#define DOWN_SENT(side, rail, of) ((of) < epoch[rail] || state[AT(side, rail)] != UP)
#ifdef FENCED_BEFORE_FLUSH
#define FENCED_SENT(side, rail, of) DOWN_SENT(side, rail, of)
#else
#define FENCED_SENT(side, rail, of) ((of) < epoch[rail] || IS_FENCED(side, rail))
#endif

/* What is about another epoch than this one changes nothing. */
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
  :: side == SENDER -> /* what this rail had last is posted anew, path-acked or not */
     if :: last_rail[0] == rail -> last_rail[0] = NONE; hedged[0] = 0 :: else fi;
     if :: last_rail[1] == rail -> last_rail[1] = NONE; hedged[1] = 0 :: else fi
  :: else
  fi
}

inline rail_closed(side, rail) { /* FENCED goes out */
  printf("%c: rail %d FENCING\n", NAME(side), rail);
  state[AT(side, rail)] = FENCING
}

/* The sender knows that both sides fenced the epoch: none of its attempts is to be waited for. */
inline resolve_epoch(rail) {
  do :: unacked[rail]?_ :: empty(unacked[rail]) -> break od;
  if
  :: IS_FENCED(RECEIVER, rail) -> do :: posted[rail]?_ :: empty(posted[rail]) -> break od
  :: else /* a broken variant: what is on its way stays there */
  fi
}

#define COMPLETIONS(rail) (completion[AT(rail, 0)] || completion[AT(rail, 1)])

/* One end of one rail. */
proctype End(byte side, rail) {
end:
  do
  /* A fault, noticed here first. */
  :: d_step { faults > 0 && state[AT(side, rail)] == UP ->
       faults--;
       rail_failed(side, rail)
     }
  /* RAIL_DOWN, or a FENCED that overtook it. */
  :: d_step { state[AT(side, rail)] == UP && COMES(DOWN_SENT, COUNTS, 1 - side, rail) ->
       rail_failed(side, rail)
     }
  /* The local fence: the queue pair is in ERR and flushed.  The sender hears no path ack of it any
   * more.  At the receiver nothing lands any more, and it has polled up to the marker. */
  :: d_step { state[AT(side, rail)] == DOWN && (side == SENDER || !COMPLETIONS(rail)) ->
       rail_closed(side, rail)
     }
  /* The device is gone.  That is a fence too, but what landed last was never heard of. */
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

/* The reuse rule: credit, and every attempt of the slot's last message resolved.  The only attempt
 * of a message that was delivered has landed. */
#ifdef NO_REUSE_RULE
#define RESOLVED(m) true
#else
#define RESOLVED(m) (!again[(m) % SLOTS] || !(UNRESOLVED(0, m) || UNRESOLVED(1, m)))
#endif
#define MAY_OPEN \
  (next < MESSAGES && next < credit + SLOTS && (next < SLOTS || RESOLVED(next - SLOTS)))
/* Otherwise nothing ever asks whether the message is resolved, and no account of it is kept. */
#define SLOT_USED_AGAIN(m) ((m) + SLOTS < MESSAGES)

#define MAY_POST(rail) (state[AT(SENDER, rail)] == UP && nfull(posted[rail]))
/* Of messages that are not delivered: `delivered` and the one after it. */
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

/* One rail as the sender uses it. */
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
  /* Path ack. */
  :: d_step { nempty(unacked[rail]) && !IS_FENCED(SENDER, rail) ->
       unacked[rail]?m;
       printf("S: path ack of message %d on rail %d\n", m, rail);
#ifdef PATH_ACK_IS_DELIVERY
       if :: m >= delivered -> last_rail[m % SLOTS] = FREED :: else fi;
#endif
       m = 0
     }
  /* Handshake and probation: each side knows that both fenced the last epoch. */
  :: d_step { state[AT(SENDER, rail)] == CONNECTING && state[AT(RECEIVER, rail)] == CONNECTING ->
       printf("rail %d UP again\n", rail);
       resolve_epoch(rail);
       epoch[rail]++;
       state[AT(SENDER, rail)] = UP;
       state[AT(RECEIVER, rail)] = UP
     }
  od
}

/* Delivery ack and credit.  They are cumulative and repeated on all rails, and a frame of them may
 * be late or lost.  So the sender may learn any count that the receiver has reached, at any time at
 * which it has a rail to hear it on; a lost frame is a count that it learns later. */
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

/* The NIC alone does this; software has no say. */
inline land(rail) {
  posted[rail]?m;
  printf("rail %d writes message %d\n", rail, m);
  /* Over what the slot was reused for; over what is not read to its end yet. */
  stale_write = memory[m % SLOTS] != NONE && m < memory[m % SLOTS];
  early_write = m > memory[m % SLOTS] && memory[m % SLOTS] >= consumed;
  assert(!stale_write);
  assert(!early_write);
  memory[m % SLOTS] = m;
  if :: SLOT_USED_AGAIN(m) -> unacked[rail]!m :: else fi;
  /* The immediate tells slot and number.  The completion of what was counted before is discarded
   * whenever it is polled, so it is left out at once. */
  if :: WANTED(m) -> completion[AT(rail, m % SLOTS)] = 1 :: else fi;
  m = 0
}

inline poll(slot, rail) {
  printf("R: completion in slot %d on rail %d\n", slot, rail);
  completion[AT(rail, slot)] = 0;
#ifndef NUMBER_IGNORED
  completion[AT(1 - rail, slot)] = 0; /* would be discarded from now on */
#endif
  arrived[slot] = 1
}

/* One rail as the receiver has it. */
#define MAY_LAND(rail) (nempty(posted[rail]) && nfull(unacked[rail]) && !IS_FENCED(RECEIVER, rail))
proctype Receiver(byte rail) {
end:
  do
  :: d_step { MAY_LAND(rail) && state[AT(SENDER, rail)] == UP -> land(rail) }
  /* Late: the sender gave the rail up, the receiver has not fenced it yet. */
  :: d_step { MAY_LAND(rail) && state[AT(SENDER, rail)] != UP -> printf("late: "); land(rail) }
  /* Polled at any time, in any order. */
  :: d_step { completion[AT(rail, 0)] -> poll(0, rail) }
  :: d_step { completion[AT(rail, 1)] -> poll(1, rail) }
  od
}

#define FINISHED \
  (consumed == MESSAGES && delivered == MESSAGES && credit == MESSAGES && \
   state[0] == UP && state[1] == UP && state[2] == UP && state[3] == UP && \
   len(posted[0]) + len(posted[1]) + len(unacked[0]) + len(unacked[1]) == 0)

/* The collective that reads the messages; reading takes time. */
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
  :: timeout -> /* nothing else can happen any more */
     stuck = !(FINISHED);
     assert(!stuck);
     break
  od
}

/* Any number of faults up to FAULTS, so that no fault that might still come hides a dead end. */
init {
  atomic {
    select(faults : 0 .. FAULTS);
    run Sender(0); run Sender(1);
    run Receiver(0); run Receiver(1);
    run End(SENDER, 0); run End(SENDER, 1); run End(RECEIVER, 0); run End(RECEIVER, 1);
    run Acks(); run Reader()
  }
}
