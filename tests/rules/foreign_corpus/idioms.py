"""The idioms of public launch scripts, one each, in our own words; make_corpus.py fills in @TP@ and the like."""

# ruff: noqa: E501  (a line is a script)

from __future__ import annotations

from dataclasses import dataclass, field

Sizes = dict[str, object]

SIZES: tuple[Sizes, ...] = (
    {"TP": 2, "PP": 1, "CP": 1, "MBS": 4, "GBS": 256, "LAYERS": 24, "HIDDEN": 2048, "HEADS": 16, "SEQ": 2048, "ZERO": 1, "NODES": 2, "GPUS": 8},
    {"TP": 8, "PP": 4, "CP": 1, "MBS": 1, "GBS": 1536, "LAYERS": 48, "HIDDEN": 8192, "HEADS": 64, "SEQ": 4096, "ZERO": 0, "NODES": 16, "GPUS": 8},
    {"TP": 4, "PP": 2, "CP": 2, "MBS": 2, "GBS": 512, "LAYERS": 32, "HIDDEN": 4096, "HEADS": 32, "SEQ": 8192, "ZERO": 2, "NODES": 4, "GPUS": 8},
    {"TP": 1, "PP": 1, "CP": 4, "MBS": 8, "GBS": 128, "LAYERS": 12, "HIDDEN": 768, "HEADS": 12, "SEQ": 1024, "ZERO": 3, "NODES": 1, "GPUS": 4},
)  # fmt: skip
MODEL = "--num-layers @LAYERS@ --hidden-size @HIDDEN@ --num-attention-heads @HEADS@ --seq-length @SEQ@ --max-position-embeddings @SEQ@ --vocab-size 50304 --position-embedding-type rope"
SPLIT = "--tensor-model-parallel-size @TP@ --pipeline-model-parallel-size @PP@ --context-parallel-size @CP@"
BATCH = "--micro-batch-size @MBS@ --global-batch-size @GBS@ --train-iters 1000 --lr 1e-4"
REST = f"{MODEL} {BATCH} --bf16"
ALL = f"{MODEL} {SPLIT} {BATCH} --bf16"


@dataclass(frozen=True, kw_only=True)
class Idiom:
    """A script, the files beside it, and with how many sizes it is written."""

    text: str
    parts: dict[str, str] = field(default_factory=dict)
    variants: int = 3


IDIOMS: dict[str, Idiom] = {}


def idiom(name: str, text: str, *, variants: int = 3, **parts: str) -> None:
    """Note one."""
    text = "#!/bin/bash\n" + text.strip("\n") + "\n"
    IDIOMS[name] = Idiom(text=text, parts={k.replace("__", "."): v for k, v in parts.items()}, variants=variants)


idiom("plain", f"torchrun --nproc_per_node @GPUS@ --nnodes @NODES@ pretrain_gpt.py {ALL} --use-distributed-optimizer")
idiom(
    "equals",
    f"python pretrain_gpt.py {MODEL} --tensor-model-parallel-size=@TP@ --pipeline-model-parallel-size=@PP@ {BATCH} --fp16",
)
idiom(
    "variables",
    f'TP=@TP@\nPP=@PP@\nMBS=@MBS@\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${{PP}} --micro-batch-size "$MBS"',
)
idiom(
    "string_of_flags",
    f'MODEL_ARGS="\n    {MODEL} \\\n"\nPARALLEL="--tensor-model-parallel-size @TP@ --pipeline-model-parallel-size @PP@"\ntorchrun pretrain_gpt.py $MODEL_ARGS $PARALLEL {BATCH} --bf16',
)
idiom(
    "array",
    f'MODEL_ARGS=(\n  {MODEL}\n)\nPARALLEL_ARGS=(\n  # the split\n  --tensor-model-parallel-size @TP@\n  --pipeline-model-parallel-size @PP@   # stages\n  --use-distributed-optimizer\n)\ntorchrun pretrain_gpt.py ${{MODEL_ARGS[@]}} "${{PARALLEL_ARGS[@]}}" {BATCH} --bf16',
)
idiom(
    "array_grows",
    f'ARGS=({MODEL} {BATCH})\nARGS+=(--tensor-model-parallel-size @TP@)\nARGS+=(--pipeline-model-parallel-size "@PP@" --bf16)\ntorchrun pretrain_gpt.py "${{ARGS[@]}}"',
)
idiom(
    "array_not_used",
    f'OLD_ARGS=(--tensor-model-parallel-size 16 --recompute-activations --fp16)\nARGS=({ALL})\ntorchrun pretrain_gpt.py "${{ARGS[@]}}"',
)
idiom(
    "string_not_used",
    f'RECOMPUTE="--recompute-granularity full --recompute-method uniform"\nFP8="--fp8-format hybrid"\ntorchrun pretrain_gpt.py {ALL} $FP8',
)
idiom(
    "command_string",
    f'CMD="torchrun --nproc_per_node @GPUS@ pretrain_gpt.py {ALL} --use-distributed-optimizer"\necho $CMD\n$CMD',
)
idiom(
    "command_eval",
    f'options="{ALL}"\nrun_cmd="torchrun pretrain_gpt.py ${{options}} --recompute-activations"\necho ${{run_cmd}}\neval ${{run_cmd}}\nset +x',
)
idiom("command_eval_quoted", f'run_cmd="torchrun pretrain_gpt.py {ALL} --data-path \'/data/a b\'"\neval "$run_cmd"')
idiom("bash_c", f'CMD="pretrain_gpt.py {ALL}"\nbash -c "torchrun --nnodes @NODES@ $CMD"')
idiom(
    "srun_bash_c",
    f'#SBATCH --nodes=@NODES@\nexport LAUNCHER="python -u -m torch.distributed.run --nproc_per_node @GPUS@ --nnodes @NODES@"\nexport CMD="pretrain_gpt.py {ALL} --deepspeed --zero-stage @ZERO@"\nsrun --jobid $SLURM_JOBID bash -c \'$LAUNCHER --node_rank $SLURM_PROCID $CMD\' 2>&1 | tee -a log.txt',
)
idiom(
    "srun_bash_c_filled",
    f'CMD="pretrain_gpt.py {ALL}"\nsrun -N @NODES@ bash -c "torchrun --node_rank \\$SLURM_PROCID $CMD"',
)
idiom(
    "default",
    f"TP=${{TP:-@TP@}}\nPP=${{PP:-@PP@}}\nGBS=${{GBS-@GBS@}}\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --global-batch-size $GBS",
)
idiom(
    "default_assigned",
    f': ${{TP:=@TP@}}\n: "${{PP:=@PP@}}"\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP',
)
idiom(
    "default_of_default",
    f"TP=${{MY_TP:-${{OTHER_TP:-@TP@}}}}\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP",
)
idiom(
    "default_by_test",
    f'if [ -z "$TP" ]; then\n  TP=@TP@\nfi\n[ -n "$PP" ] || PP=@PP@\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP',
)
idiom(
    "if_constant",
    f'USE_FP8=1\nif [ $USE_FP8 -eq 1 ]; then\n  PRECISION="--bf16 --fp8-format hybrid"\nelse\n  PRECISION="--fp16"\nfi\ntorchrun pretrain_gpt.py {MODEL} {SPLIT} {BATCH} $PRECISION',
)
idiom(
    "if_constant_off",
    f'RECOMPUTE=false\nif [ "$RECOMPUTE" = true ]; then\n  EXTRA="--recompute-granularity full"\nelse\n  EXTRA=""\nfi\ntorchrun pretrain_gpt.py {ALL} $EXTRA',
)
idiom(
    "elif",
    f"SIZE=@LAYERS@\nif [ $SIZE = 12 ]; then\n  TP=1; PP=1\nelif [ $SIZE = 24 ]; then\n  TP=2; PP=1\nelif [ $SIZE = 32 ]; then\n  TP=4; PP=2\nelse\n  TP=8; PP=4\nfi\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP",
)
idiom(
    "case",
    f'MODEL_SIZE="h@HIDDEN@"\ncase $MODEL_SIZE in\n  h768|h1024) TP=1 ;;\n  h2048)\n    TP=2\n    ;;\n  h4*) TP=4 ;;\n  *) TP=8 ;;\nesac\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size ${{TP}}',
)
idiom(
    "double_brackets",
    f'NAME=llama-@LAYERS@l\nif [[ $NAME == llama-* && @TP@ -gt 1 ]]; then\n  SP="--sequence-parallel"\nfi\nif [[ ! $NAME =~ ^gpt ]]; then AC="--recompute-activations"; fi\ntorchrun pretrain_gpt.py {ALL} $SP $AC',
)
idiom(
    "arithmetic_test",
    f'TP=@TP@\nif (( TP > 4 )); then ZERO="--use-distributed-optimizer"; else ZERO=; fi\nif ((TP * @PP@ == 1)); then AC=--recompute-activations; fi\ntorchrun pretrain_gpt.py {ALL} $ZERO $AC',
)
idiom(
    "and_or",
    f'AC=1\nZERO=0\nEXTRA=""\n[ $AC -eq 1 ] && EXTRA="$EXTRA --recompute-granularity selective"\n[[ $ZERO == 1 ]] && EXTRA="$EXTRA --use-distributed-optimizer"\n[ $ZERO = 0 ] || EXTRA="--fp16"\ntorchrun pretrain_gpt.py {ALL} $EXTRA',
)
idiom(
    "function_arguments",
    f"launch() {{\n  local tp=$1\n  local pp=$2\n  torchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $tp --pipeline-model-parallel-size $pp\n}}\nlaunch @TP@ @PP@",
)
idiom(
    "function_shift",
    f'function run_training {{\n  TP=$1; shift\n  PP=$1; shift\n  torchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP "$@"\n}}\nrun_training @TP@ @PP@ --use-distributed-optimizer --recompute-activations',
)
idiom(
    "function_local",
    f"TP=@TP@\nset_small() {{ local TP=99; OTHER=1; }}\nset_small\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP",
)
idiom(
    "function_echo",
    f"twice() {{ echo $(( $1 * 2 )); }}\nGBS=$(twice @GBS@)\ntorchrun pretrain_gpt.py {ALL} --global-batch-size $GBS",
)
idiom(
    "arithmetic",
    f"NODES=@NODES@\nGPUS=@GPUS@\nWORLD=$((NODES * GPUS))\nDP=$(( WORLD / (@TP@ * @PP@ * @CP@) ))\nMBS=@MBS@\nGBS=$(($MBS * ${{DP}} * 8))\ntorchrun pretrain_gpt.py {ALL} --global-batch-size $GBS --micro-batch-size $((MBS))",
)
idiom(
    "expr",
    f"GBS=$(expr @MBS@ \\* 64)\nSEQ=`expr @SEQ@ + 0`\ntorchrun pretrain_gpt.py {ALL} --global-batch-size $GBS --seq-length $SEQ",
)
idiom("echo_bc", f'GBS=$(echo "@MBS@ * 32" | bc)\ntorchrun pretrain_gpt.py {ALL} --global-batch-size $GBS')
idiom(
    "counting",
    f"GBS=@MBS@\nfor ((i = 0; i < 3; i++)); do\n  GBS=$((GBS * 2))\ndone\ntorchrun pretrain_gpt.py {ALL} --global-batch-size $GBS",
)
idiom(
    "while_loop",
    f'n=0\nARGS=()\nwhile [ $n -lt 2 ]; do\n  ARGS+=(--note$n x)\n  n=$((n + 1))\ndone\nlet n=n+@TP@-2\ntorchrun pretrain_gpt.py {REST} "${{ARGS[@]}}" --tensor-model-parallel-size $n',
)
idiom(
    "for_words",
    f'ARGS=""\nfor flag in --bf16 --use-distributed-optimizer --recompute-activations; do\n  ARGS="$ARGS $flag"\ndone\ntorchrun pretrain_gpt.py {MODEL} {SPLIT} {BATCH} $ARGS',
)
idiom(
    "for_seq",
    f"LAST=0\nfor i in $(seq 1 @PP@); do LAST=$i; done\ntorchrun pretrain_gpt.py {REST} --pipeline-model-parallel-size $LAST",
)
idiom(
    "for_braces", f"for i in {{1..2}}; do LAST=$i; done\ntorchrun pretrain_gpt.py {ALL} --context-parallel-size $LAST"
)
idiom(
    "several_runs",
    f"for TP in 1 @TP@; do\n  torchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP\ndone",
    variants=3,
)
idiom(
    "strip_name",
    f"CONFIG=gpt_tp@TP@_pp@PP@.yaml\nBASE=${{CONFIG%.yaml}}\nTP=${{BASE#*_tp}}\nTP=${{TP%%_*}}\nPP=${{BASE##*pp}}\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP",
)
idiom(
    "replace_in_text",
    f'ARGS="--tensor-model-parallel-size 1 --pipeline-model-parallel-size @PP@"\ntorchrun pretrain_gpt.py {REST} ${{ARGS/size 1/size @TP@}}',
)
idiom("upper_case", f"DTYPE=BF16\ntorchrun pretrain_gpt.py {MODEL} {SPLIT} {BATCH} --${{DTYPE,,}}")
idiom(
    "array_length",
    f"HOSTS=(a b c d)\nNNODES=${{#HOSTS[@]}}\ntorchrun --nnodes $NNODES pretrain_gpt.py {ALL} --global-batch-size $((NNODES * 64))",
)
idiom("array_element", f"SIZES=(1 @TP@ 16)\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size ${{SIZES[1]}}")
idiom(
    "array_slice",
    f'ALL_ARGS=(--fp16 --tensor-model-parallel-size @TP@)\ntorchrun pretrain_gpt.py {MODEL} {BATCH} --bf16 "${{ALL_ARGS[@]:1:2}}"',
)
idiom(
    "table",
    f"declare -A TPS\nTPS[small]=1\nTPS[large]=@TP@\ndeclare -A PPS=( [small]=1 [large]=@PP@ )\nKIND=large\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size ${{TPS[$KIND]}} --pipeline-model-parallel-size ${{PPS[large]}}",
)
idiom(
    "indirect", f"TP_large=@TP@\nNAME=TP_large\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size ${{!NAME}}"
)
idiom(
    "set_positional",
    f"set -- @TP@ @PP@\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $1 --pipeline-model-parallel-size $2",
)
idiom(
    "exported",
    f"export TP=@TP@ PP=@PP@\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nNCCL_DEBUG=WARN torchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP",
)
idiom(
    "sourced",
    f"source parts/@STEM@_sizes.sh\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP ${{EXTRA[@]}}",
    sizes__sh="TP=@TP@\nEXTRA=(--use-distributed-optimizer)\n",
)
idiom(
    "sourced_beside",
    f'DIR="$( cd "$( dirname "${{BASH_SOURCE[0]:-$0}}" )" && pwd )"\n. "$(dirname "$0")/parts/@STEM@_sizes.sh"\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP',
    sizes__sh="TP=@TP@\n",
)
idiom(
    "cat_file",
    f"ARGS=$(cat parts/@STEM@_arguments.txt)\ntorchrun pretrain_gpt.py {MODEL} {BATCH} $ARGS",
    arguments__txt="--tensor-model-parallel-size @TP@\n--bf16\n",
)
idiom("read_here", f"read -r -d '' ARGS <<EOF\n{SPLIT}\n--bf16\nEOF\ntorchrun pretrain_gpt.py {MODEL} {BATCH} $ARGS")
idiom(
    "read_words",
    f'read TP PP <<< "@TP@ @PP@"\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP',
)
idiom(
    "given_twice",
    f"torchrun pretrain_gpt.py --tensor-model-parallel-size 64 --fp16-lm-cross-entropy {ALL} --micro-batch-size 1",
)
idiom(
    "deepspeed_here",
    f'ZERO_STAGE=@ZERO@\nconfig_json="./ds_config.json"\ncat <<EOT > $config_json\n{{\n  "train_micro_batch_size_per_gpu": @MBS@,\n  "train_batch_size": @GBS@,\n  "zero_optimization": {{ "stage": $ZERO_STAGE }},\n  "bf16": {{ "enabled": true }}\n}}\nEOT\ndeepspeed --num_gpus @GPUS@ pretrain_gpt.py {ALL} --deepspeed --deepspeed_config $config_json --zero-stage $ZERO_STAGE',
)
idiom(
    "deepspeed_here_literal",
    f'cat > ds.json << \'EOF\'\n{{ "zero_optimization": {{"stage": @ZERO@}}, "fp16": {{"enabled": true, "loss_scale": 0}} }}\nEOF\ndeepspeed pretrain_gpt.py {MODEL} {SPLIT} {BATCH} --fp16 --deepspeed --deepspeed_config ds.json',
)
idiom(
    "deepspeed_echo",
    f'DS=/tmp/unused.json\nDS=ds_@STEM@.json\necho "{{" > $DS\necho "  \\"zero_optimization\\": {{\\"stage\\": @ZERO@}}" >> $DS\necho "}}" >> $DS\ndeepspeed pretrain_gpt.py {ALL} --deepspeed --deepspeed_config=$DS',
)
idiom(
    "deepspeed_sed",
    f'sed "s/STAGE/@ZERO@/" parts/@STEM@_template.json | sed "s/MICRO/@MBS@/" > made.json\ndeepspeed pretrain_gpt.py {ALL} --deepspeed --deepspeed_config made.json --zero-stage @ZERO@',
    template__json='{"zero_optimization": {"stage": STAGE}, "train_micro_batch_size_per_gpu": MICRO}\n',
)
idiom(
    "deepspeed_file",
    f"deepspeed pretrain_gpt.py {ALL} --deepspeed --deepspeed_config parts/@STEM@_ds.json --deepspeed-activation-checkpointing --checkpoint-activations",
    ds__json='{"zero_optimization": {"stage": @ZERO@}}\n',
)
idiom(
    "deepspeed_flag_only",
    f'ds_args=""\nds_args=" --deepspeed ${{ds_args}}"\nds_args=" --zero-stage=@ZERO@ ${{ds_args}}"\nds_args=" --no-pipeline-parallel ${{ds_args}}"\ndeepspeed pretrain_gpt.py {ALL} $ds_args',
)
idiom("deepspeed_off", f"deepspeed pretrain_gpt.py {ALL} --zero-stage 3")
idiom(
    "bloom",
    '#SBATCH --nodes=@NODES@\nGPUS_PER_NODE=8\nNNODES=@NODES@\nPP_SIZE=@PP@\nTP_SIZE=@TP@\nMICRO_BATCH_SIZE=@MBS@\nGLOBAL_BATCH_SIZE=@GBS@\nZERO_STAGE=0\nconfig_json="./ds_config.$SLURM_JOBID.json"\ncat <<EOT > $config_json\n{"train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE, "zero_optimization": {"stage": $ZERO_STAGE}, "bf16": {"enabled": true}}\nEOT\nGPT_ARGS=" \\\n  --pp-partition-method \'type:transformer|embedding\' \\\n  --num-layers @LAYERS@ --hidden-size @HIDDEN@ --num-attention-heads @HEADS@ --seq-length @SEQ@ \\\n  --micro-batch-size $MICRO_BATCH_SIZE --rampup-batch-size 16 16 9_765_625 --global-batch-size $GLOBAL_BATCH_SIZE \\\n  --train-samples 220000000 --position-embedding-type alibi --embed-layernorm --pad-vocab-size-to 250880 --bf16 --checkpoint-activations \\\n  "\nDEEPSPEED_ARGS=" \\\n  --deepspeed --deepspeed_config ${config_json} --zero-stage ${ZERO_STAGE} --deepspeed-activation-checkpointing "\nexport LAUNCHER="python -u -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --max_restarts 0"\nexport CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE $GPT_ARGS $DEEPSPEED_ARGS "\necho $CMD\nsrun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt',
)
idiom(
    "old_checkpointing",
    f"torchrun pretrain_gpt.py {ALL} --activations-checkpoint-method uniform --activations-checkpoint-num-layers 1",
)
idiom(
    "recompute_block",
    f"torchrun pretrain_gpt.py {ALL} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
)
idiom(
    "fsdp",
    f"torchrun pretrain_gpt.py {MODEL} {BATCH} --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer",
)
idiom(
    "module_launch",
    f'DISTRIBUTED_ARGS="--nproc_per_node @GPUS@ --nnodes @NODES@ --node_rank 0 --master_addr localhost --master_port 6000"\npython -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py {ALL} --DDP-impl local',
)
idiom("mpirun", f"mpirun -np $((@NODES@ * @GPUS@)) -x PATH --map-by ppr:@GPUS@:node python pretrain_gpt.py {ALL}")
idiom(
    "singularity",
    f'srun singularity exec --nv image.sif bash -c "cd /work && torchrun pretrain_gpt.py {ALL} --use-distributed-optimizer"',
)
idiom("nohup_log", f"nohup torchrun pretrain_gpt.py {ALL} > train.log 2>&1 &\nwait")
idiom("exec_last", f'ARGS="{ALL}"\nexec torchrun pretrain_gpt.py $ARGS')
idiom(
    "unknown_argument",
    f"TP=$1\nPP=${{2:-@PP@}}\ntorchrun pretrain_gpt.py {MODEL} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP {BATCH} --bf16",
    variants=2,
)
idiom(
    "unknown_environment",
    f"torchrun pretrain_gpt.py {MODEL} --tensor-model-parallel-size $MODEL_PARALLEL {BATCH} --bf16",
    variants=2,
)
idiom(
    "unknown_command",
    f"GPUS=$(nvidia-smi -L | wc -l)\nGBS=$((GPUS * 64))\ntorchrun --nproc_per_node $GPUS pretrain_gpt.py {ALL} --global-batch-size $GBS",
    variants=2,
)
idiom(
    "unknown_branch",
    f'if [ "$(hostname)" = login01 ]; then\n  TP=1\n  EXTRA="--recompute-activations"\nelse\n  TP=@TP@\nfi\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP $EXTRA',
    variants=3,
)
idiom(
    "unknown_case",
    f'case "$MODEL_NAME" in\n  7b) TP=1; AC=--recompute-activations ;;\n  70b) TP=8; AC= ;;\n  *) TP=@TP@; AC= ;;\nesac\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP $AC',
    variants=3,
)
idiom(
    "unknown_array",
    f'ARGS=({MODEL} {SPLIT} {BATCH})\nif [ -f /etc/no-such-file ]; then\n  ARGS+=(--fp16 --use-distributed-optimizer)\nelse\n  ARGS+=(--bf16)\nfi\ntorchrun pretrain_gpt.py "${{ARGS[@]}}"',
    variants=3,
)
idiom(
    "unknown_same",
    f'if [ "$(hostname)" = a ]; then NAME=one; TP=@TP@; else NAME=two; TP=@TP@; fi\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --save out/$NAME',
    variants=3,
)
idiom(
    "usage_exit",
    f'if [ $# -gt 3 ]; then\n  echo "usage: $0 [TP]"\n  exit 1\nfi\nTP=${{1:-@TP@}}\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP',
)
idiom(
    "parse_arguments",
    f'TP=@TP@\nPP=@PP@\nwhile [[ $# -gt 0 ]]; do\n  case "$1" in\n    --tp) TP="$2"; shift 2 ;;\n    --pp) PP="$2"; shift 2 ;;\n    *) echo unknown; exit 1 ;;\n  esac\ndone\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP "$@"',
)
idiom(
    "getopts",
    f'TP=@TP@\nwhile getopts "t:h" opt; do\n  case $opt in\n    t) TP=$OPTARG ;;\n    h) exit 0 ;;\n  esac\ndone\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP',
)
idiom(
    "extra_arguments",
    f'EXTRA_ARGS=${{EXTRA_ARGS:-""}}\ntorchrun pretrain_gpt.py {ALL} --use-distributed-optimizer $EXTRA_ARGS $MORE "$@"',
)
idiom(
    "prepares_first",
    f"pip install sentencepiece\npython tools/preprocess_data.py --input a.json --vocab-file v.json --workers 8\ntorchrun pretrain_gpt.py {ALL}",
)
idiom(
    "comments_and_lines",
    f'# TP=99\ntorchrun \\\n  pretrain_gpt.py `# the program` \\\n  {ALL} \\\n  --no-load-optim; echo "done --fp16 --tensor-model-parallel-size 77" # --recompute-activations',
)
idiom(
    "offload_sum",
    f'TP=@TP@; PP=@PP@\nMP=$((TP*PP)); [ $MP -ge 8 ] && AC="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" || AC=""\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP $AC',
)
idiom(
    "sequence_parallel",
    f'SP_FLAG=$([ @TP@ -gt 1 ] && echo "--sequence-parallel")\ntorchrun pretrain_gpt.py {ALL} $SP_FLAG',
    variants=2,
)
idiom(
    "ternary",
    f"TP=@TP@\nCP=$(( TP > 4 ? 2 : 1 ))\ntorchrun pretrain_gpt.py {REST} --tensor-model-parallel-size $TP --context-parallel-size $CP",
)
