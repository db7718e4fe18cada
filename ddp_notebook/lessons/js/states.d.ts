// State of a lesson as the kernel sends it (lessons/acts.py).

import type { RemoteCall, RemotePair, RemoteReference } from "../../widgets/js/calls.js";

/** JSON has no NaN and no infinities, so they are strings. */
export type Figure = number | "nan" | "inf" | "-inf";
/** From, to, bytes. */
export type Link = [number, number, number];

interface State {
  world_size: number;
  answered?: string; // the last request that was completed
  error?: string;
}

export interface ExplorerState extends State {
  kind: "collective";
  op: string;
  reduce_op: string;
  root: number;
  peer: number;
  group: number[];
  dtype: string;
  sizes: number[];
  ops: string[];
  dtypes: string[];
  reduce_ops: string[];
  reduces: boolean;
  rooted: boolean;
  messages: boolean; // send and receive
  uneven: boolean;
  wrong: string[];
  actors: number[];
  line: string;
  formula: string;
  inputs: Record<number, number[]>;
  in_chunks: Record<number, [string, number][]>;
  out_chunks: Record<number, [string, number][]>;
  who: Record<number, number[][]>; // the ranks whose data an element contains
  specified: number[];
  prediction: Record<number, Figure[]>;
  result: Record<number, number[]> | null;
  right: Record<number, boolean[]> | null;
  agrees: boolean | null;
  happened: Happened | null;
}

export interface Happened {
  kind: string;
  rank: number;
  code: string;
  error: string;
  message: string;
  by_rank: Record<number, string>;
  values: Record<number, Figure[]>;
  seconds: number;
}

export interface StepperState extends State {
  kind: "algorithm";
  name: string;
  names: string[];
  steps: number;
  taken: number;
  sizes: number[];
  dtype: string;
  rules: string[];
  states: Shown[];
  theory: Link[];
  real_line: string;
  agrees: boolean | null;
}

/** After one step. */
export interface Shown {
  moves: [number, number, number, number][]; // from, to, first and last element
  chunks: number[][][]; // by rank and chunk
  who: number[][][];
  links: Link[];
}

export interface SceneState extends State {
  kind: "messages";
  name: string;
  stories: [string, string][];
  title: string;
  lesson: string;
  code: string;
  events: Event[];
  parts: Record<string, string>; // meanings of the colours
  arrows: [number, number][];
  said: string[];
  message: string;
  strip: number[] | null;
}

/** Computation or a call; times are milliseconds. */
export interface Event {
  rank: number;
  what: string;
  peer: number | null;
  tag: number;
  nbytes: number;
  start: number;
  end: number;
  spans: [number, number, string][]; // start, end, part
  over: boolean;
}

export interface RemoteState extends State {
  kind: "remote";
  name: string;
  stories: [string, string][];
  lesson: string;
  code: string;
  question: string;
  choices: string[];
  guess: string | null;
  answer: string | null;
  right: boolean | null;
  said: string[];
  run: number | null; // cell of the last run
  calls: RemoteCall[];
  references: RemoteReference[];
  pairs: RemotePair[];
}

export interface ProductState extends State {
  kind: "product";
  placements: string[];
  of_a: string;
  of_b: string;
  question: string;
  choices: string[];
  guess: string | null;
  answer: string | null;
  right: boolean | null;
  said: string[];
  to_multiply: string[]; // collectives of rank 0
  to_put_together: string[];
  matrices: Matrix[]; // A and B, and the product after the multiplication
  whole: number[][] | null;
  agrees: boolean | null;
}

export interface Matrix {
  name: string;
  shape: [number, number];
  placement: string;
  partial: boolean; // the values of the ranks must be summed
  parts: { rank: number; offset: [number, number]; size: [number, number]; values: number[][] }[];
}

export interface MeshState extends State {
  kind: "mesh";
  ways: [string, string][];
  way: string;
  heights: number[]; // the rows that these ranks can compute
  rows: number;
  columns: number;
  by_rank: boolean;
  question: string;
  choices: string[];
  guess: string | null;
  answer: string | null;
  right: boolean | null;
  said: string[];
  same: boolean | null;
  run: boolean;
  held: Record<number, number>; // share of the parameters, by rank
  batches: Record<number, number>;
  calls: MeshCall[];
}

/** A call of one step; times are milliseconds. */
export interface MeshCall {
  rank: number;
  way: "row" | "column";
  purpose: string;
  op: string;
  module: string;
  nbytes: number;
  start: number;
  end: number;
}
