# Starts Redis with a user for each role of the cluster, and `default` for the operator alone. All passwords come from the
# environment and go on by a pipe, for a command line is nobody's secret; they are letters and digits. The rules are
# those that `outrider redis-acl` prints. With TLS in the environment it speaks TLS alone, and reads renewed certificates
# within the hour.
set -e
if [ "${TLS:-}" ]; then
    while sleep 3600; do
        valkey-cli --tls --cacert /tls/ca.crt config set tls-cert-file /tls/tls.crt tls-key-file /tls/tls.key
    done &
fi
exec valkey-server /etc/redis/redis.conf - <<END
${TLS:+port 0
tls-port 6379
tls-ca-cert-file /tls/ca.crt
tls-cert-file /tls/tls.crt
tls-key-file /tls/tls.key
tls-auth-clients no}
requirepass ${REDISCLI_AUTH:?}
user outrider-router on >${ROUTER_PASSWORD:?} resetchannels -@all +ping +select +client|setinfo +cluster|slots +asking +command +multi +exec +script|load +scan +time +info (%RW~outrider:{*}:session %RW~outrider:{*}:log +evalsha +hget +hgetall +hmget +hset +hdel +exists +pexpire +xadd +xrange +xrevrange +del) (%RW~outrider:{leases}* +evalsha +zadd +zrem +zscore +zrangebyscore +set) (%RW~outrider:idempotency:* %RW~outrider:responses:* +get +set) (%R~outrider:{workers}:* +smembers +mget) (%W~outrider:{workers}:ids %W~outrider:{workers}:drafter-ids +srem) (%W~outrider:{workers}:drafter-id:* %W~outrider:{workers}:drafter-ids +set +sadd +del) (%W~outrider:{tickets}:keys +zadd +zremrangebyscore +expire) (%R~outrider:{keys} %R~outrider:{keys}:readers +hget) (%RW~outrider:{adapters}* +hget +hgetall +hlen +hset +hdel) (%RW~outrider:{usage:*}:ends %RW~outrider:{usage:*}:bytes %RW~outrider:{usage:*}:claims +evalsha +hget +hset +hincrby +hdel +zadd +zrem +zcard +zscore +zrangebyscore +zremrangebyscore +pexpire) (%RW~outrider:{acceptance}:* +get +set) (%W~outrider:{examples}:* +xadd +xtrim +expire) (&outrider:session-events +publish +subscribe)
user outrider-verifier on >${VERIFIER_PASSWORD:?} resetchannels -@all +ping +select +client|setinfo +cluster|slots +asking +command +multi +exec +time (%W~outrider:{workers}:id:* %W~outrider:{workers}:ids +set +sadd +del +srem) (%R~outrider:{tickets}:keys +zrevrange)
user outrider-drafter on >${DRAFTER_PASSWORD:?} resetchannels -@all +ping +select +client|setinfo +cluster|slots +asking +command +multi +exec +time (%W~outrider:{workers}:drafter-id:* %W~outrider:{workers}:drafter-ids +set +sadd +del +srem) (%R~outrider:{tickets}:keys +zrevrange) (%R~outrider:{versions}:* +hgetall) (%RW~outrider:{verdicts}:* +hgetall +hsetnx +expire)
user outrider-trainer on >${TRAINER_PASSWORD:?} resetchannels -@all +ping +select +client|setinfo +cluster|slots +asking +command +multi +exec (%R~outrider:{examples}:* +xrange +xrevrange) (%RW~outrider:{versions}:* %RW~outrider:{verdicts}:* +hget +hgetall +hsetnx +hdel +expire) (%R~outrider:{workers}:* +smembers +mget) (%W~outrider:{workers}:ids %W~outrider:{workers}:drafter-ids +srem)
user outrider-keys on >${KEYS_PASSWORD:?} resetchannels -@all +ping +select +client|setinfo +cluster|slots +asking +command +multi +exec +time (%RW~outrider:{keys} +hset +hget +hgetall +hdel) (%W~outrider:{keys}:readers +hset)
END
